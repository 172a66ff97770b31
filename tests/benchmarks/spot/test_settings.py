"""Every setting on a folder of traces, and what plans count on beside what the traces say."""

import json
from pathlib import Path

import pytest

from benchmarks.spot import settings


def test_the_spot_benchmark_counts_what_is_planned_with(tmp_path: Path) -> None:
    for name, ticks in (("a", [1, 0, 1, 1]), ("b", [0, 1, 1, 0])):
        trace = {"metadata": {"gap_seconds": 3600}, "data": ticks * 30}
        (tmp_path / f"{name}.json").write_text(json.dumps(trace))
    rows = {row["what"]: row for row in settings.count(tmp_path)}
    assert rows["a"]["losses"] == 30
    assert rows["typical zone (geometric mean)"]["machine hours"] == 150
    # Together there is a machine at any hour.
    assert rows["fleet of 2 pools"]["hours to the next"] == 0
    assert rows["planned with, one pool"]["losses per machine hour"] > 0


def test_fails_a_benchmark_without_traces_and_says_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"skipped\. Get the .json files of skypilot-org"):
        settings.measure(folder=tmp_path / "none", num_starts=1)
