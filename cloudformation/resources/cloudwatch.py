"""CloudWatch alarms, composite alarms and dashboards."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cloudformation.resource import Provisioned, Registry, ResourceRequest, ResourceType
from cloudformation.resources.lookups import deletes, finds

_ALARM = (
    "ActionsEnabled", "AlarmActions", "AlarmDescription", "ComparisonOperator",
    "DatapointsToAlarm", "Dimensions", "EvaluateLowSampleCountPercentile", "EvaluationPeriods",
    "ExtendedStatistic", "InsufficientDataActions", "MetricName", "Metrics", "Namespace",
    "OKActions", "Period", "Statistic", "Tags", "Threshold", "ThresholdMetricId",
    "TreatMissingData", "Unit",
)  # fmt: skip
_COMPOSITE = (
    "ActionsEnabled", "AlarmActions", "AlarmDescription", "AlarmRule", "InsufficientDataActions",
    "OKActions", "Tags", "ActionsSuppressor", "ActionsSuppressorWaitPeriod",
    "ActionsSuppressorExtensionPeriod",
)  # fmt: skip


def _put(operation: str, names: Sequence[str], request: ResourceRequest) -> Provisioned:
    name = request.get("AlarmName") or request.physical_id or request.generated_name(longest=255)
    getattr(request.client("cloudwatch"), operation)(AlarmName=name, **request.pick(*names))
    arn = request.account.arn("cloudwatch", f"alarm:{name}")
    return Provisioned(id=name, attributes={"Arn": arn})


_put_alarm = partial(_put, "put_metric_alarm", _ALARM)
_put_composite = partial(_put, "put_composite_alarm", _COMPOSITE)
_delete_alarm = deletes("cloudwatch", "delete_alarms", "AlarmNames", listed=True)


def _described(request: ResourceRequest, kind: str) -> list[Any]:
    answer = request.client("cloudwatch").describe_alarms(
        AlarmNames=[request.physical_id], AlarmTypes=[kind]
    )
    return list(answer["MetricAlarms"]) + list(answer.get("CompositeAlarms", []))


def _put_dashboard(request: ResourceRequest) -> Provisioned:
    name = (
        request.get("DashboardName") or request.physical_id or request.generated_name(longest=255)
    )
    request.client("cloudwatch").put_dashboard(
        DashboardName=name, DashboardBody=request.properties["DashboardBody"]
    )
    return Provisioned(id=name)


TYPES: Registry = {
    "AWS::CloudWatch::Alarm": ResourceType(
        create=_put_alarm,
        update=_put_alarm,
        delete=_delete_alarm,
        exists=lambda request: bool(_described(request, "MetricAlarm")),
    ),
    "AWS::CloudWatch::CompositeAlarm": ResourceType(
        create=_put_composite,
        update=_put_composite,
        delete=_delete_alarm,
        exists=lambda request: bool(_described(request, "CompositeAlarm")),
    ),
    "AWS::CloudWatch::Dashboard": ResourceType(
        create=_put_dashboard,
        update=_put_dashboard,
        delete=deletes("cloudwatch", "delete_dashboards", "DashboardNames", listed=True),
        exists=finds("cloudwatch", "get_dashboard", "DashboardName"),
    ),
}
