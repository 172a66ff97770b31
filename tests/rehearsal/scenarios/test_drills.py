"""Drills with real machines, each to its end; all but the most telling are slow."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rehearsal.drill.demo import processes_below
from rehearsal.scenarios.scenario import known_scenarios

Start = Callable[..., subprocess.Popen[str]]
REPOSITORY = Path(__file__).parents[3]
TOLD = "bad-gpu"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts drills; none outlives a test that fails."""
    started: list[subprocess.Popen[str]] = []

    def run(*names: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rehearsal", "drill", "--json", "--out", str(tmp_path)]
        process = subprocess.Popen(
            [*command, *names],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)


def outcomes(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "drills.json").read_text())
    return found


def test_a_bad_gpu_costs_its_machine_alone_and_ctrl_c_in_the_next_drill_leaves_nothing(
    tmp_path: Path, start: Start
) -> None:
    process = start(TOLD, "notice")
    deadline = time.monotonic() + 1200
    while not processes_below(tmp_path / "notice") and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.2)
    assert processes_below(tmp_path / "notice")
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # as impatient people do
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert processes_below(tmp_path) == []
    (outcome,) = outcomes(tmp_path)
    assert outcome["faults"] == [], said[-3000:]
    assert (outcome["name"], outcome["ends"], outcome["machines"]) == (TOLD, "equal result", 2)
    assert "0 NVIDIA GPUs are on the PCI bus" in outcome["why"]
    assert outcome["guard"] > 0


@pytest.mark.slow
def test_every_drill_ends_as_written(tmp_path: Path, start: Start) -> None:
    others = [each.name for each in known_scenarios() if each.name != TOLD]
    printed, said = start(*others).communicate(timeout=3 * 3600)
    assert [each["name"] for each in outcomes(tmp_path)] == others
    assert json.loads(printed) == outcomes(tmp_path)
    assert [each for each in outcomes(tmp_path) if each["faults"]] == [], said[-3000:]
    assert processes_below(tmp_path) == []
