"""CloudWatch alarms, composite alarms and dashboards."""

from typing import Any

from cloudformation.resource import HandlerRequest, Registry, ResourceType
from cloudformation.resources.calls import creates, deletes, finds


def _alarm(put: str, kind: str) -> ResourceType:
    create = creates("cloudwatch", put, name="AlarmName", longest=255, arn="alarm:{}")

    def exists(request: HandlerRequest) -> bool:
        found: dict[str, Any] = request.client("cloudwatch").describe_alarms(
            AlarmNames=[request.physical_id], AlarmTypes=[kind]
        )
        return bool(found[f"{kind}s"])

    return ResourceType(
        create=create,
        update=create,
        delete=deletes("cloudwatch", "delete_alarms", by="AlarmNames"),
        exists=exists,
    )


_put_dashboard = creates("cloudwatch", "put_dashboard", name="DashboardName", longest=255)

TYPES: Registry = {
    "AWS::CloudWatch::Alarm": _alarm("put_metric_alarm", "MetricAlarm"),
    "AWS::CloudWatch::CompositeAlarm": _alarm("put_composite_alarm", "CompositeAlarm"),
    "AWS::CloudWatch::Dashboard": ResourceType(
        create=_put_dashboard,
        update=_put_dashboard,
        delete=deletes("cloudwatch", "delete_dashboards", by="DashboardNames"),
        exists=finds("cloudwatch", "get_dashboard", by="DashboardName"),
    ),
}
