"""CloudWatch alarms, composite alarms and dashboards."""

from typing import Any

from cloudformation.resource import Made, Registry, ResourceType, Wish
from cloudformation.resources.asking import ask

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


def _put_alarm(wish: Wish) -> Made:
    name = wish.get("AlarmName") or wish.physical_id or wish.generated_name(longest=255)
    wish.client("cloudwatch").put_metric_alarm(AlarmName=name, **wish.pick(*_ALARM))
    return Made(id=name, attributes={"Arn": wish.account.arn("cloudwatch", f"alarm:{name}")})


def _put_composite(wish: Wish) -> Made:
    name = wish.get("AlarmName") or wish.physical_id or wish.generated_name(longest=255)
    wish.client("cloudwatch").put_composite_alarm(AlarmName=name, **wish.pick(*_COMPOSITE))
    return Made(id=name, attributes={"Arn": wish.account.arn("cloudwatch", f"alarm:{name}")})


def _delete_alarm(wish: Wish) -> None:
    wish.client("cloudwatch").delete_alarms(AlarmNames=[wish.physical_id])


def _described(wish: Wish, kind: str) -> list[Any]:
    answer = wish.client("cloudwatch").describe_alarms(
        AlarmNames=[wish.physical_id], AlarmTypes=[kind]
    )
    return list(answer["MetricAlarms"]) + list(answer.get("CompositeAlarms", []))


def _put_dashboard(wish: Wish) -> Made:
    name = wish.get("DashboardName") or wish.physical_id or wish.generated_name(longest=255)
    wish.client("cloudwatch").put_dashboard(
        DashboardName=name, DashboardBody=wish.properties["DashboardBody"]
    )
    return Made(id=name)


def _dashboard_exists(wish: Wish) -> bool:
    found = ask(wish.client("cloudwatch").get_dashboard, DashboardName=wish.physical_id)
    return found is not None


TYPES: Registry = {
    "AWS::CloudWatch::Alarm": ResourceType(
        create=_put_alarm,
        update=_put_alarm,
        delete=_delete_alarm,
        exists=lambda wish: bool(_described(wish, "MetricAlarm")),
    ),
    "AWS::CloudWatch::CompositeAlarm": ResourceType(
        create=_put_composite,
        update=_put_composite,
        delete=_delete_alarm,
        exists=lambda wish: bool(_described(wish, "CompositeAlarm")),
    ),
    "AWS::CloudWatch::Dashboard": ResourceType(
        create=_put_dashboard,
        update=_put_dashboard,
        delete=lambda wish: wish.client("cloudwatch").delete_dashboards(
            DashboardNames=[wish.physical_id]
        ),
        exists=_dashboard_exists,
    ),
}
