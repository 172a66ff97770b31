"""CloudWatch log groups, streams, metric filters and resource policies."""

from cloudformation.resource import Made, Registry, ResourceType, Wish, tag_map
from cloudformation.resources.asking import ask


def _create_group(wish: Wish) -> Made:
    name = wish.get("LogGroupName") or wish.generated_name(longest=512)
    tags = tag_map(wish.get("Tags"))
    arguments = {"kmsKeyId": wish.properties["KmsKeyId"]} if wish.get("KmsKeyId") else {}
    wish.client("logs").create_log_group(
        logGroupName=name, **({"tags": tags} if tags else {}), **arguments
    )
    return Made(id=name, attributes={"Arn": wish.account.arn("logs", f"log-group:{name}:*")})


def _configure_group(wish: Wish) -> None:
    logs, name = wish.client("logs"), wish.physical_id
    if "RetentionInDays" in wish.properties:
        days = wish.properties["RetentionInDays"]
        logs.put_retention_policy(logGroupName=name, retentionInDays=days)
    elif wish.old.get("RetentionInDays"):
        logs.delete_retention_policy(logGroupName=name)
    old, new = tag_map(wish.old.get("Tags")), tag_map(wish.get("Tags"))
    arn = wish.account.arn("logs", f"log-group:{name}")
    if set(old) - set(new):
        logs.untag_resource(resourceArn=arn, tagKeys=sorted(set(old) - set(new)))
    if wish.old and new and new != old:
        logs.tag_resource(resourceArn=arn, tags=new)


def _group_exists(wish: Wish) -> bool:
    found = wish.client("logs").describe_log_groups(logGroupNamePrefix=wish.physical_id)
    return any(group["logGroupName"] == wish.physical_id for group in found["logGroups"])


def _create_stream(wish: Wish) -> Made:
    name = wish.get("LogStreamName") or wish.generated_name(longest=512)
    wish.client("logs").create_log_stream(
        logGroupName=wish.properties["LogGroupName"], logStreamName=name
    )
    return Made(id=name)


def _stream_exists(wish: Wish) -> bool:
    found = ask(
        wish.client("logs").describe_log_streams,
        logGroupName=wish.properties["LogGroupName"],
        logStreamNamePrefix=wish.physical_id,
    )
    return bool(found and found["logStreams"])


def _put_filter(wish: Wish) -> Made:
    name = wish.get("FilterName") or wish.physical_id or wish.generated_name(longest=512)
    changes = [
        {key[0].lower() + key[1:]: value for key, value in item.items() if key != "Dimensions"}
        | ({"dimensions": {pair["Key"]: pair["Value"] for pair in item["Dimensions"]}}
           if "Dimensions" in item else {})
        for item in wish.properties["MetricTransformations"]
    ]  # fmt: skip
    wish.client("logs").put_metric_filter(
        logGroupName=wish.properties["LogGroupName"],
        filterName=name,
        filterPattern=wish.properties["FilterPattern"],
        metricTransformations=changes,
    )
    return Made(id=name)


def _update_filter(wish: Wish) -> Made:
    # moto adds a second filter of the same name instead of changing the first.
    _delete_filter(wish)
    return _put_filter(wish)


def _delete_filter(wish: Wish) -> None:
    wish.client("logs").delete_metric_filter(
        logGroupName=wish.properties["LogGroupName"], filterName=wish.physical_id
    )


def _filter_exists(wish: Wish) -> bool:
    found = wish.client("logs").describe_metric_filters(
        logGroupName=wish.properties["LogGroupName"], filterNamePrefix=wish.physical_id
    )
    return bool(found["metricFilters"])


def _put_policy(wish: Wish) -> Made:
    name = wish.properties["PolicyName"]
    wish.client("logs").put_resource_policy(
        policyName=name, policyDocument=wish.properties["PolicyDocument"]
    )
    return Made(id=name)


def _policy_exists(wish: Wish) -> bool:
    found = wish.client("logs").describe_resource_policies()["resourcePolicies"]
    return any(policy["policyName"] == wish.physical_id for policy in found)


TYPES: Registry = {
    "AWS::Logs::LogGroup": ResourceType(
        create=_create_group,
        configure=_configure_group,
        delete=lambda wish: wish.client("logs").delete_log_group(logGroupName=wish.physical_id),
        exists=_group_exists,
    ),
    "AWS::Logs::LogStream": ResourceType(
        create=_create_stream,
        delete=lambda wish: wish.client("logs").delete_log_stream(
            logGroupName=wish.properties["LogGroupName"], logStreamName=wish.physical_id
        ),
        exists=_stream_exists,
    ),
    "AWS::Logs::MetricFilter": ResourceType(
        create=_put_filter,
        update=_update_filter,
        delete=_delete_filter,
        exists=_filter_exists,
    ),
    "AWS::Logs::ResourcePolicy": ResourceType(
        create=_put_policy,
        update=_put_policy,
        delete=lambda wish: wish.client("logs").delete_resource_policy(policyName=wish.physical_id),
        exists=_policy_exists,
    ),
}
