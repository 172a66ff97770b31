"""The state of an alarm: its own definition evaluated over the published data.

The rules are those of "Using Amazon CloudWatch alarms" in the CloudWatch user guide: M out of N,
and how missing data counts. Tests check `decide` against the tables printed there.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rehearsal.alarms.expressions import evaluate

OK, ALARM, INSUFFICIENT = "OK", "ALARM", "INSUFFICIENT_DATA"
# "CloudWatch attempts to retrieve a higher number of data points": in its example 5 for 3.
EXTRA_POINTS = 2

Dimensions = frozenset[tuple[str, str]]
_BREACHES: dict[str, Callable[[float, float], bool]] = {
    "GreaterThanOrEqualToThreshold": lambda value, threshold: value >= threshold,
    "GreaterThanThreshold": lambda value, threshold: value > threshold,
    "LessThanThreshold": lambda value, threshold: value < threshold,
    "LessThanOrEqualToThreshold": lambda value, threshold: value <= threshold,
}
_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "Average": lambda values: sum(values) / len(values),
    "Sum": sum,
    "Maximum": max,
    "Minimum": min,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric: a name with its namespace and dimensions."""

    namespace: str
    name: str
    dimensions: Dimensions


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistic:
    """A statistic of one metric over periods."""

    metric: Metric
    statistic: str
    period: int


# Every value of a metric with its time in seconds, oldest first.
Source = Callable[[Metric], Sequence[tuple[float, float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """An alarm, as a CloudFormation template and DescribeAlarms define it."""

    name: str
    statistics: Mapping[str, Statistic]
    expression: str
    breaches: Callable[[float, float], bool]
    threshold: float
    points: int
    periods: int
    missing: str
    description: str
    actions: Sequence[Any]

    @classmethod
    def from_properties(cls, name: str, properties: Mapping[str, Any]) -> "Alarm":
        """Read the properties of AWS::CloudWatch::Alarm; a Ref is represented by its name."""
        queries = properties.get("Metrics") or [
            {
                "Id": "m",
                "ReturnData": True,
                "MetricStat": {
                    "Metric": properties,
                    "Period": properties["Period"],
                    "Stat": properties["Statistic"],
                },
            }
        ]
        (returned,) = [query for query in queries if query.get("ReturnData", True)]
        return cls(
            name=name,
            statistics={
                query["Id"]: _statistic(query["MetricStat"])
                for query in queries
                if "MetricStat" in query
            },
            expression=returned.get("Expression", returned["Id"]),
            breaches=_BREACHES[properties["ComparisonOperator"]],
            threshold=properties["Threshold"],
            points=properties.get("DatapointsToAlarm", properties["EvaluationPeriods"]),
            periods=properties["EvaluationPeriods"],
            missing=properties.get("TreatMissingData", "missing"),
            description=properties.get("AlarmDescription", ""),
            actions=properties.get("AlarmActions", []),
        )

    def state(self, source: Source, now: float, before: str) -> str:
        """Return the state at `now`, evaluated over the periods that end there."""
        (period,) = {each.period for each in self.statistics.values()}
        breaching: list[bool | None] = []
        for back in range(self.periods + EXTRA_POINTS, 0, -1):
            start = now - back * period
            values = {
                name: _over_window(source(each.metric), start, start + period, each.statistic)
                for name, each in self.statistics.items()
            }
            value = evaluate(self.expression, values)
            breaching.append(None if value is None else self.breaches(value, self.threshold))
        return decide(breaching, self.points, self.periods, self.missing) or before


def decide(retrieved: Sequence[bool | None], points: int, periods: int, missing: str) -> str | None:
    """Return the state for retrieved points, oldest first: True breaching, None missing.

    Returns None if the alarm keeps its state.
    """
    real = [point for point in retrieved if point is not None]
    if len(real) >= periods:
        return ALARM if sum(real[-periods:]) >= points else OK
    if missing in ("breaching", "notBreaching"):
        filled = [*real, *[missing == "breaching"] * (periods - len(real))]
        return ALARM if sum(filled) >= points else OK
    if real and (sum(real) >= points or not all(real)):
        return ALARM if sum(real) >= points else OK
    if missing == "ignore":
        return None
    # Too few points, all of them breaching: an alarm if the oldest is at least `points` old.
    ages = [age for age, point in enumerate(reversed(retrieved), start=1) if point]
    return ALARM if ages and max(ages) >= points else INSUFFICIENT


def _over_window(
    series: Sequence[tuple[float, float]], start: float, end: float, statistic: str
) -> float | None:
    first, after = (bisect_left(series, (time,)) for time in (start, end))
    values = [value for _, value in series[first:after]]
    return _STATISTICS[statistic](values) if values else None


def _statistic(stat: Mapping[str, Any]) -> Statistic:
    metric = stat["Metric"]
    return Statistic(
        metric=Metric(
            namespace=metric["Namespace"],
            name=metric["MetricName"],
            dimensions=frozenset(
                (each["Name"], _text(each["Value"])) for each in metric.get("Dimensions", [])
            ),
        ),
        statistic=stat["Stat"],
        period=stat["Period"],
    )


def _text(value: Any) -> str:
    return str(value["Ref"]) if isinstance(value, Mapping) else str(value)
