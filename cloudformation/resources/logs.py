"""CloudWatch log groups, streams, metric filters and resource policies."""

from cloudformation.resource import Provisioned, Registry, ResourceRequest, ResourceType, tag_map
from cloudformation.resources.lookups import deletes, look_up


def _create_group(request: ResourceRequest) -> Provisioned:
    name = request.get("LogGroupName") or request.generated_name(longest=512)
    tags = tag_map(request.get("Tags"))
    arguments = {"kmsKeyId": request.properties["KmsKeyId"]} if request.get("KmsKeyId") else {}
    request.client("logs").create_log_group(
        logGroupName=name, **({"tags": tags} if tags else {}), **arguments
    )
    return Provisioned(
        id=name, attributes={"Arn": request.account.arn("logs", f"log-group:{name}:*")}
    )


def _configure_group(request: ResourceRequest) -> None:
    logs, name = request.client("logs"), request.physical_id
    if "RetentionInDays" in request.properties:
        days = request.properties["RetentionInDays"]
        logs.put_retention_policy(logGroupName=name, retentionInDays=days)
    elif request.old.get("RetentionInDays"):
        logs.delete_retention_policy(logGroupName=name)
    old, new = tag_map(request.old.get("Tags")), tag_map(request.get("Tags"))
    arn = request.account.arn("logs", f"log-group:{name}")
    if set(old) - set(new):
        logs.untag_resource(resourceArn=arn, tagKeys=sorted(set(old) - set(new)))
    if request.old and new and new != old:
        logs.tag_resource(resourceArn=arn, tags=new)


def _group_exists(request: ResourceRequest) -> bool:
    found = request.client("logs").describe_log_groups(logGroupNamePrefix=request.physical_id)
    return any(group["logGroupName"] == request.physical_id for group in found["logGroups"])


def _create_stream(request: ResourceRequest) -> Provisioned:
    name = request.get("LogStreamName") or request.generated_name(longest=512)
    request.client("logs").create_log_stream(
        logGroupName=request.properties["LogGroupName"], logStreamName=name
    )
    return Provisioned(id=name)


def _stream_exists(request: ResourceRequest) -> bool:
    found = look_up(
        request.client("logs").describe_log_streams,
        logGroupName=request.properties["LogGroupName"],
        logStreamNamePrefix=request.physical_id,
    )
    return bool(found and found["logStreams"])


def _put_filter(request: ResourceRequest) -> Provisioned:
    name = request.get("FilterName") or request.physical_id or request.generated_name(longest=512)
    changes = [
        {key[0].lower() + key[1:]: value for key, value in item.items() if key != "Dimensions"}
        | ({"dimensions": {pair["Key"]: pair["Value"] for pair in item["Dimensions"]}}
           if "Dimensions" in item else {})
        for item in request.properties["MetricTransformations"]
    ]  # fmt: skip
    request.client("logs").put_metric_filter(
        logGroupName=request.properties["LogGroupName"],
        filterName=name,
        filterPattern=request.properties["FilterPattern"],
        metricTransformations=changes,
    )
    return Provisioned(id=name)


def _update_filter(request: ResourceRequest) -> Provisioned:
    # moto adds a second filter of the same name instead of changing the first.
    _delete_filter(request)
    return _put_filter(request)


def _delete_filter(request: ResourceRequest) -> None:
    request.client("logs").delete_metric_filter(
        logGroupName=request.properties["LogGroupName"], filterName=request.physical_id
    )


def _filter_exists(request: ResourceRequest) -> bool:
    found = request.client("logs").describe_metric_filters(
        logGroupName=request.properties["LogGroupName"], filterNamePrefix=request.physical_id
    )
    return bool(found["metricFilters"])


def _put_policy(request: ResourceRequest) -> Provisioned:
    name = request.properties["PolicyName"]
    request.client("logs").put_resource_policy(
        policyName=name, policyDocument=request.properties["PolicyDocument"]
    )
    return Provisioned(id=name)


def _policy_exists(request: ResourceRequest) -> bool:
    found = request.client("logs").describe_resource_policies()["resourcePolicies"]
    return any(policy["policyName"] == request.physical_id for policy in found)


TYPES: Registry = {
    "AWS::Logs::LogGroup": ResourceType(
        create=_create_group,
        configure=_configure_group,
        delete=deletes("logs", "delete_log_group", "logGroupName"),
        exists=_group_exists,
    ),
    "AWS::Logs::LogStream": ResourceType(
        create=_create_stream,
        delete=lambda request: request.client("logs").delete_log_stream(
            logGroupName=request.properties["LogGroupName"], logStreamName=request.physical_id
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
        delete=deletes("logs", "delete_resource_policy", "policyName"),
        exists=_policy_exists,
    ),
}
