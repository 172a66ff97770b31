"""The state of an alarm: its own definition evaluated over the published data.

The rules are those of "Using Amazon CloudWatch alarms" in the CloudWatch user guide: M out of N,
and how missing data counts. Tests check `decide` against the tables printed there. Of metric math
it knows what our alarms use: arithmetic, comparisons, AND, OR, IF; it refuses anything else.
"""

import ast
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

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
        # An expression may name others: they take the place of their ids.
        others = {each["Id"]: f"({each['Expression']})" for each in queries if "Expression" in each}
        return cls(
            name=name,
            statistics={
                query["Id"]: _statistic(query["MetricStat"])
                for query in queries
                if "MetricStat" in query
            },
            expression=re.sub(
                r"\w+",
                lambda word: others.get(word[0], word[0]),
                returned.get("Expression", returned["Id"]),
            ),
            breaches=_BREACHES[properties["ComparisonOperator"]],
            threshold=properties["Threshold"],
            points=properties.get("DatapointsToAlarm", properties["EvaluationPeriods"]),
            periods=properties["EvaluationPeriods"],
            missing=properties.get("TreatMissingData", "missing"),
            description=properties.get("AlarmDescription", ""),
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


Values = Mapping[str, float | None]

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def evaluate(expression: str, values: Values) -> float | None:
    """Return the value of an expression over metric ids, or None if it has no data point."""
    return _value(_parsed(expression), values)


@cache
def _parsed(expression: str) -> ast.expr:
    # AND and OR are Python's operators in capitals; everything else is valid Python.
    python = re.sub(r"\b(AND|OR)\b", lambda word: word[0].lower(), expression)
    return ast.parse(python, mode="eval").body


def _value(node: ast.expr, values: Values) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        pair = _pair(node.left, node.right, values)
        if pair is None or (isinstance(node.op, ast.Div) and pair[1] == 0):
            return None
        return _ARITHMETIC[type(node.op)](*pair)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        pair = _pair(node.left, node.comparators[0], values)
        return None if pair is None else float(_COMPARISONS[type(node.ops[0])](*pair))
    if isinstance(node, ast.BoolOp):
        parts = [_value(each, values) for each in node.values]
        if all(part is None for part in parts):
            return None
        join = all if isinstance(node.op, ast.And) else any
        return float(join(parts))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "IF":
        return _if(node.args, values)
    raise ValueError(f"the rehearsal does not support this metric math: {ast.unparse(node)}")


def _pair(left: ast.expr, right: ast.expr, values: Values) -> tuple[float, float] | None:
    """Return both sides of an operator: "missing values in a time series are treated as 0".

    That holds if the other side is a time series with a value. If neither side has a value, or the
    other side is a number, there is no data point.
    """
    first, second = _value(left, values), _value(right, values)
    series = [
        value
        for node, value in ((left, first), (right, second))
        if not isinstance(node, ast.Constant)
    ]
    if series and all(value is None for value in series):
        return None
    return first or 0.0, second or 0.0


def _if(arguments: list[ast.expr], values: Values) -> float | None:
    """Evaluate IF(condition, then, otherwise); without a condition, None; a missing `then` is 0."""
    condition = _value(arguments[0], values)
    if condition is None:
        return None
    if condition:
        return _value(arguments[1], values) or 0.0
    return _value(arguments[2], values) if len(arguments) > 2 else None
