"""Drills with real machines, each to its end; all but the most telling are slow."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rehearsal.drill.deployment import processes_below
from rehearsal.scenarios.scenario import known_scenarios

TOLD = "bad-gpu"


def outcomes(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "drills.json").read_text())
    return found


def test_a_bad_gpu_costs_its_machine_alone_and_ctrl_c_in_the_next_drill_leaves_nothing(
    tmp_path: Path,
    rehearse: Callable[..., subprocess.Popen[str]],
    stop_once_a_machine_runs: Callable[[subprocess.Popen[str], Path], str],
) -> None:
    process = rehearse("drill", "--json", "--out", str(tmp_path), TOLD, "notice")
    said = stop_once_a_machine_runs(process, tmp_path / "notice")
    assert processes_below(tmp_path) == []
    (outcome,) = outcomes(tmp_path)
    assert outcome["faults"] == [], said[-3000:]
    assert (outcome["name"], outcome["ends"], outcome["machines"]) == (TOLD, "equal result", 2)
    assert "0 NVIDIA GPUs are on the PCI bus" in outcome["why"]
    assert outcome["guard"] > 0


@pytest.mark.slow
def test_every_drill_ends_as_written(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]]
) -> None:
    others = [each.name for each in known_scenarios() if each.name != TOLD]
    process = rehearse("drill", "--json", "--out", str(tmp_path), *others)
    printed, said = process.communicate(timeout=3 * 3600)
    assert [each["name"] for each in outcomes(tmp_path)] == others
    assert json.loads(printed) == outcomes(tmp_path)
    assert [each for each in outcomes(tmp_path) if each["faults"]] == [], said[-3000:]
    assert processes_below(tmp_path) == []
