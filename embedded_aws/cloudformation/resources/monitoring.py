"""CloudWatch alarms and dashboards, and the log groups of CloudWatch Logs."""

from embedded_aws.cloudformation.resource import HandlerRequest, Registry, ResourceType
from embedded_aws.cloudformation.resources.calls import call, creates, deletes, finds, retag

_put_alarm = creates(
    "cloudwatch", "put_metric_alarm", name="AlarmName", longest=255, arn="alarm:{}"
)
_put_dashboard = creates("cloudwatch", "put_dashboard", name="DashboardName", longest=255)


def _configure_group(request: HandlerRequest) -> None:
    name = request.physical_id
    if "RetentionInDays" in request.properties:
        call(request, "logs", "put_retention_policy", logGroupName=name)
    elif request.old.get("RetentionInDays"):
        request.client("logs").delete_retention_policy(logGroupName=name)
    retag(request, "logs", resourceArn=request.account.arn("logs", f"log-group:{name}"))


TYPES: Registry = {
    "AWS::CloudWatch::Alarm": ResourceType(
        create=_put_alarm,
        update=_put_alarm,
        delete=deletes("cloudwatch", "delete_alarms", by="AlarmNames"),
        exists=finds("cloudwatch", "describe_alarms", by="AlarmNames", answer="MetricAlarms"),
    ),
    "AWS::CloudWatch::Dashboard": ResourceType(
        create=_put_dashboard,
        update=_put_dashboard,
        delete=deletes("cloudwatch", "delete_dashboards", by="DashboardNames"),
        exists=finds("cloudwatch", "get_dashboard", by="DashboardName"),
    ),
    "AWS::Logs::LogGroup": ResourceType(
        create=creates(
            "logs", "create_log_group", name="LogGroupName", longest=512, arn="log-group:{}:*"
        ),
        configure=_configure_group,
        fixed=frozenset({"KmsKeyId", "LogGroupClass"}),
        delete=deletes("logs", "delete_log_group", by="logGroupName"),
        exists=finds(
            "logs",
            "describe_log_groups",
            by="logGroupNamePrefix",
            answer="logGroups",
            where=lambda request, group: group["logGroupName"] == request.physical_id,
        ),
    ),
}
