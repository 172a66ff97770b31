"""CloudWatch log groups, streams, metric filters and resource policies."""

from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, creates, deletes, finds, retag


def _configure_group(request: HandlerRequest) -> None:
    name = request.physical_id
    if "RetentionInDays" in request.properties:
        call(request, "logs", "put_retention_policy", logGroupName=name)
    elif request.old.get("RetentionInDays"):
        request.client("logs").delete_retention_policy(logGroupName=name)
    retag(request, "logs", resourceArn=request.account.arn("logs", f"log-group:{name}"))


def _update_filter(request: HandlerRequest) -> Provisioned:
    # moto adds a second filter of the same name instead of changing the first.
    _delete_filter(request)
    return _put_filter(request)


_put_filter = creates("logs", "put_metric_filter", name="FilterName", longest=512)
_delete_filter = deletes("logs", "delete_metric_filter", "LogGroupName", by="filterName")
_put_policy = creates("logs", "put_resource_policy", name="PolicyName")

TYPES: Registry = {
    "AWS::Logs::LogGroup": ResourceType(
        create=creates(
            "logs", "create_log_group", name="LogGroupName", longest=512, arn="log-group:{}:*"
        ),
        configure=_configure_group,
        delete=deletes("logs", "delete_log_group", by="logGroupName"),
        exists=finds(
            "logs",
            "describe_log_groups",
            by="logGroupNamePrefix",
            answer="logGroups",
            where=lambda request, group: group["logGroupName"] == request.physical_id,
        ),
    ),
    "AWS::Logs::LogStream": ResourceType(
        create=creates("logs", "create_log_stream", name="LogStreamName", longest=512),
        delete=deletes("logs", "delete_log_stream", "LogGroupName", by="logStreamName"),
        exists=finds(
            "logs",
            "describe_log_streams",
            "LogGroupName",
            by="logStreamNamePrefix",
            answer="logStreams",
        ),
    ),
    "AWS::Logs::MetricFilter": ResourceType(
        create=_put_filter,
        update=_update_filter,
        delete=_delete_filter,
        exists=finds(
            "logs",
            "describe_metric_filters",
            "LogGroupName",
            by="filterNamePrefix",
            answer="metricFilters",
        ),
    ),
    "AWS::Logs::ResourcePolicy": ResourceType(
        create=_put_policy,
        update=_put_policy,
        delete=deletes("logs", "delete_resource_policy", by="policyName"),
        exists=finds(
            "logs",
            "describe_resource_policies",
            answer="resourcePolicies",
            where=lambda request, policy: policy["policyName"] == request.physical_id,
        ),
    ),
}
