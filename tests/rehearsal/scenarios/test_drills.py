"""Drills, each to its end; all that train on machines are slow, but for one without root."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rehearsal.drill.deployment import processes_below
from rehearsal.scenarios.scenario import NSPAWN, PROCESS, choose

TOLD = "bad-gpu"
ALL_SECONDS = 4 * 3600
# Ten of the drills in one run.
MOST_TELLING = "bad-day"
SHORT = "notice"


def outcomes(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "drills.json").read_text())
    return found


def stop_once_a_machine_runs(process: subprocess.Popen[str], folder: Path) -> str:
    """Press Ctrl-C twice when a machine runs below a folder; return what the rehearsal has said."""
    deadline = time.monotonic() + 1200
    while not processes_below(folder) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.2)
    assert processes_below(folder)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # as impatient people do
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in said
    return said


@pytest.mark.rootless
def test_a_bad_gpu_costs_its_machine_alone_and_ctrl_c_in_the_next_drill_leaves_nothing(
    tmp_path: Path,
    rehearse: Callable[..., subprocess.Popen[str]],
) -> None:
    process = rehearse("drill", "--json", "--out", str(tmp_path), TOLD, "notice")
    said = stop_once_a_machine_runs(process, tmp_path / "notice")
    assert processes_below(tmp_path) == []
    (outcome,) = outcomes(tmp_path)
    assert outcome["faults"] == [], said[-3000:]
    assert (outcome["name"], outcome["ends"], outcome["machines"]) == (TOLD, "equal result", 2)
    assert "0 NVIDIA GPUs are on the PCI bus" in outcome["why"]
    assert outcome["guard"] > 0


@pytest.mark.slow  # tests/rehearsal/test_demo.py has a kill and a notice on such machines
@pytest.mark.machine
@pytest.mark.parametrize("name", [SHORT, MOST_TELLING])
def test_a_drill_ends_as_written_on_machines_with_systemd(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]], name: str
) -> None:
    _expect_as_written(rehearse, tmp_path, NSPAWN, [name])


@pytest.mark.slow
@pytest.mark.timeout(ALL_SECONDS)
@pytest.mark.parametrize("machine", [PROCESS, pytest.param(NSPAWN, marks=pytest.mark.machine)])
def test_every_drill_ends_as_written(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]], machine: str
) -> None:
    _expect_as_written(rehearse, tmp_path, machine, [each.name for each in choose([], machine)])


def _expect_as_written(
    rehearse: Callable[..., subprocess.Popen[str]], folder: Path, machine: str, names: Sequence[str]
) -> None:
    process = rehearse("drill", "--machine", machine, "--json", "--out", str(folder), *names)
    printed, said = process.communicate(timeout=ALL_SECONDS)
    assert [each["name"] for each in outcomes(folder)] == list(names), said[-3000:]
    assert json.loads(printed) == outcomes(folder)
    assert [each for each in outcomes(folder) if each["faults"]] == [], said[-3000:]
    assert processes_below(folder) == []
