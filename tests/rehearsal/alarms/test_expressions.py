"""Metric math against the tables of "Using metric math" in the CloudWatch user guide."""

import pytest

from rehearsal.alarms.evaluation import evaluate

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
