"""Drills, each to its end; all that train on machines are slow, but for one without root."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rehearsal.demo.deployment import processes_below
from rehearsal.demo.fleet import KINDS
from rehearsal.drills.drill import NSPAWN, PROCESS, choose

TOLD = "bad-gpu"
ALL_SECONDS = 4 * 3600
# Ten of the drills in one run.
MOST_TELLING = "bad-day"
SHORT = "notice"
# No pool has a machine: all but what machines do, in the time of a deployment.
CHEAPEST = "no-capacity"


def outcomes(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "drills.json").read_text())
    return found


@pytest.mark.rootless
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


@pytest.mark.slow  # the demo and tests/operate deploy in each run of the tests; a drill's parts too
def test_a_drill_without_a_machine_ends_as_written(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]]
) -> None:
    _expect_as_written(rehearse, tmp_path, PROCESS, [CHEAPEST])


@pytest.mark.slow  # tests/rehearsal/test_demo.py has a kill and a notice on such machines
@pytest.mark.machine
@pytest.mark.parametrize("name", [SHORT, MOST_TELLING])
def test_a_drill_ends_as_written_on_machines_with_systemd(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]], name: str
) -> None:
    _expect_as_written(rehearse, tmp_path, NSPAWN, [name])


@pytest.mark.slow
@pytest.mark.timeout(ALL_SECONDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", [PROCESS, pytest.param(NSPAWN, marks=pytest.mark.machine)])
def test_every_drill_ends_as_written(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]], machine: str, kind: str
) -> None:
    names = [each.name for each in choose([], machine)]
    _expect_as_written(rehearse, tmp_path, machine, names, kind)


def _expect_as_written(
    rehearse: Callable[..., subprocess.Popen[str]],
    folder: Path,
    machine: str,
    names: Sequence[str],
    kind: str = KINDS[0],
) -> None:
    kinds = ("--machine", machine, "--fleet", kind)
    process = rehearse("drill", *kinds, "--json", "--out", str(folder), *names)
    printed, said = process.communicate(timeout=ALL_SECONDS)
    assert [each["name"] for each in outcomes(folder)] == list(names), said[-3000:]
    assert json.loads(printed) == outcomes(folder)
    assert [each for each in outcomes(folder) if each["faults"]] == [], said[-3000:]
    assert processes_below(folder) == []
