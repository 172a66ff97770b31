"""The report page: charts hold every spike and gap, and nothing of a run ends its script."""

import json
import re
from typing import Any

from contract.report import Bar, Curve, chart, page, table, timeline


def drawn(chart: str) -> dict[str, Any]:
    """The chart as the page's script gets it."""
    (text,) = re.findall(r'<script type="application/json">(.*)</script>', chart)
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_spike_in_a_long_curve_is_drawn() -> None:
    y = [0.0] * 100_000
    y[77_777], y[3] = 9.0, -1.0
    found = drawn(chart([Curve(name="loss", x=range(len(y)), y=y)], y_label="loss"))
    assert len(found["curves"][0]["x"]) <= 1002
    assert set(found["curves"][0]["y"]) == {0.0, 9.0, -1.0}


def test_a_chart_of_many_curves_is_small() -> None:
    """Each had a value or a gap at the steps of all: a sweep's page took 27 MB."""
    y = [float(step * 7919 % 1000) for step in range(2000)]
    curves = [Curve(name=f"run-{n}", x=range(n, n + 2000), y=y) for n in range(100)]
    text = chart(curves, y_label="loss")
    assert len(text) < 400_000
    assert [(min(each["y"]), max(each["y"])) for each in drawn(text)["curves"]] == [(0, 999)] * 100


def test_curves_of_other_steps_keep_their_own_and_a_number_that_is_none_is_a_gap() -> None:
    run = Curve(name="run", x=[1, 2, 4], y=[3.0, float("nan"), 1.0])
    other = Curve(name="uninterrupted", x=[1, 3], y=[3.0, 2.0], is_reference=True)
    found = drawn(chart([run, other], y_label="loss", marks=[4]))
    assert [curve["x"] for curve in found["curves"]] == [[1, 2, 4], [1, 3]]
    assert [curve["y"] for curve in found["curves"]] == [[3, None, 1], [3, 2]]
    assert [curve["is_reference"] for curve in found["curves"]] == [False, True]
    assert (found["marks"], found["x_label"], found["y_label"]) == ([4], "step", "loss")
    assert chart([Curve(name="none", x=[], y=[])], y_label="loss") == ""


def test_a_name_can_end_neither_its_script_nor_its_cell() -> None:
    name = "</script><b>"
    curves = chart([Curve(name=name, x=[1], y=[2.0])], y_label=name)
    assert drawn(curves)["curves"][0]["name"] == name
    rows = timeline([(name, [Bar(start=0, seconds=1, kind="done")], name)])
    whole = page(
        title=name,
        verdict=name,
        tone="good",
        sections={name: table([(name, name)]) + curves + rows},
    )
    assert name not in whole
    assert timeline([]) == ""


def test_a_confusion_matrix_is_shaded_by_the_share_of_its_row() -> None:
    found = table([["dog", "3", "1"], ["cat", "0", "0"]], ["is", "dog", "cat"], is_confusion=True)
    assert re.findall(r"c0\) (\d+)%", found) == ["45", "15", "0", "0"]
    assert re.findall(r">(\w+)</td>", found) == ["dog", "3", "1", "cat", "0", "0"]
