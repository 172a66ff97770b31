"""The state of an alarm against the two tables of the CloudWatch user guide, and over windows."""

import pytest

from rehearsal.alarms.evaluation import ALARM, INSUFFICIENT, OK, Alarm, Metric, decide, evaluate

KEEP = None
TREATMENTS = ("missing", "ignore", "breaching", "notBreaching")
# "How Alarm State is Evaluated When Data is Missing": 0 within the threshold, X beyond, - missing;
# what follows is the state for each treatment, in the order above. 3 of 3 points, 5 retrieved.
THREE_OF_THREE = {
    "0 - X - X": (OK, OK, OK, OK),
    "0 - - - -": (OK, OK, OK, OK),
    "- - - - -": (INSUFFICIENT, KEEP, ALARM, OK),
    "0 X X - X": (ALARM, ALARM, ALARM, ALARM),
    "- - - - X": (INSUFFICIENT, KEEP, ALARM, OK),
    "X - - - -": (ALARM, KEEP, ALARM, OK),
}
TWO_OF_THREE = {
    "0 - X - X": (ALARM, ALARM, ALARM, ALARM),
    "0 0 X 0 X": (ALARM, ALARM, ALARM, ALARM),
    "0 - X - -": (OK, OK, ALARM, OK),
    "- - - - 0": (OK, OK, ALARM, OK),
    "- - - - X": (INSUFFICIENT, KEEP, ALARM, OK),
}
PRINTED = [
    (points, row, treatment, state)
    for points, table in ((3, THREE_OF_THREE), (2, TWO_OF_THREE))
    for row, states in table.items()
    for treatment, state in zip(TREATMENTS, states, strict=True)
]


@pytest.mark.parametrize(("points", "row", "treatment", "state"), PRINTED)
def test_states_are_those_of_the_guides_tables(
    points: int, row: str, treatment: str, state: str | None
) -> None:
    retrieved = [{"0": False, "X": True, "-": None}[mark] for mark in row.split()]
    assert decide(retrieved, points, 3, treatment) == state


def alarm(**properties: object) -> Alarm:
    base = {
        "Namespace": "n",
        "MetricName": "m",
        "Statistic": "Average",
        "Period": 60,
        "EvaluationPeriods": 2,
        "Threshold": 10,
        "ComparisonOperator": "GreaterThanThreshold",
        "TreatMissingData": "notBreaching",
    }
    return Alarm.from_properties("a", {**base, **properties})


def test_a_window_takes_what_lies_in_it_by_its_statistic() -> None:
    values = [(0.0, 8.0), (30.0, 16.0), (60.0, 11.0), (120.0, 0.0)]
    for statistic, state in (("Average", ALARM), ("Minimum", OK), ("Maximum", ALARM)):
        found = alarm(Statistic=statistic).state(lambda _: values, 120, INSUFFICIENT)
        assert found == state, statistic


def test_an_alarm_goes_off_after_all_its_periods_and_back_after_one() -> None:
    values = [(minute * 60.0, 20.0 if 3 <= minute < 6 else 1.0) for minute in range(10)]
    states = [alarm().state(lambda _: values, minute * 60, OK) for minute in range(2, 10)]
    assert states == [OK, OK, OK, ALARM, ALARM, OK, OK, OK]


def test_another_dimension_is_another_metric() -> None:
    published = Metric(namespace="n", name="m", dimensions=frozenset({("Stack", "A")}))
    series = {published: [(0.0, 99.0), (60.0, 99.0)]}

    def state(stack: str) -> str:
        dimensions = [{"Name": "Stack", "Value": stack}]
        return alarm(Dimensions=dimensions).state(lambda m: series.get(m, []), 120, OK)

    assert (state("A"), state("B")) == (ALARM, OK)


Series = list[float | None]


def over(expression: str, **series: Series) -> Series:
    length = len(next(iter(series.values())))
    return [
        evaluate(expression, {name: values[point] for name, values in series.items()})
        for point in range(length)
    ]


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("metric1 < metric2", [0, 0, 1, 0]),
        ("metric1 >= 30", [1, 0, 0, 0]),
        ("metric1 > 15 AND metric2 > 15", [1, 0, 0, 0]),
    ],
)
def test_comparisons_are_those_of_the_guide(expression: str, wanted: Series) -> None:
    assert over(expression, metric1=[30, 20, 0, 0], metric2=[20, None, 20, None]) == wanted


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("IF(metric1, metric2, metric3)", [30, 0, 20, None, None]),
        ("IF(metric1, 5, metric3)", [5, 5, 20, None, None]),
        ("IF(metric1, metric2, 5)", [30, 0, 5, 5, None]),
    ],
)
def test_if_is_that_of_the_guide(expression: str, wanted: Series) -> None:
    metric1: Series = [1, 1, 0, 0, None]
    metric2: Series = [30, None, 0, 0, 30]
    metric3: Series = [0, 0, 20, None, 20]
    assert over(expression, metric1=metric1, metric2=metric2, metric3=metric3) == wanted


def test_missing_values_count_as_zero_beside_present_ones() -> None:
    assert over("a - b", a=[5, 5, None, None], b=[2, None, 2, None]) == [3, 5, -2, None]


def test_a_division_by_zero_is_no_data_point() -> None:
    assert over("100 * a / b", a=[1, 1, None], b=[4, 0, None]) == [25, None, None]


@pytest.mark.parametrize("expression", ["SUM(METRICS())", "a ** 2", "ANOMALY(a)"])
def test_fails_for_math_that_it_does_not_know(expression: str) -> None:
    with pytest.raises(ValueError, match="does not support this metric math"):
        evaluate(expression, {"a": 1.0})
