"""Runs side by side: three stacks in one account, one of their machines taken, all equal."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rehearsal.demo.deployment import processes_below
from rehearsal.drills.many import SideOutcome, many_table


def test_the_table_sums_up_what_the_guards_counted() -> None:
    good = SideOutcome(
        stack="Training-r1", machines=1, taken="", seconds=9.5, usd=0.0125, faults=()
    )
    taken = replace(good, stack="Training-r2", machines=2, taken="kill:dense:20")
    runs = [good, taken, replace(good, stack="Training-r3", faults=("the weights differ",))]
    console = Console(width=160, record=True)
    console.print(many_table(runs))
    lines = console.export_text().splitlines()
    (total,) = [line for line in lines if "3 runs" in line]
    assert [cell.strip() for cell in total.split("│")][1:-1] == [
        "3 runs", "4", "1 of 4", "", "0.0375", "2 of 3",
    ]  # fmt: skip
    assert any("NO: the weights differ" in line for line in lines)


@pytest.mark.slow  # two minutes of CPU
def test_many_runs_side_by_side_end_equal_and_leave_nothing(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]]
) -> None:
    process = rehearse("many", "--runs", "3", "--out", str(tmp_path), "--json")
    printed, said = process.communicate(timeout=1500)
    assert process.returncode == 0, said[-3000:]
    document = json.loads(printed)
    assert document == json.loads((tmp_path / "many.json").read_text())
    assert document["faults"] == []
    assert [each["machines"] for each in document["runs"]] == [1, 2, 1]
    assert [each["taken"] for each in document["runs"]] == ["", "kill:dense:20", ""]
    # Cents: a machine of some seconds.
    assert all(0 < each["usd"] < 0.2 for each in document["runs"])
    assert processes_below(tmp_path) == []
