"""Drills with real machines, each to its end; all of them are slow, the most telling is not."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rehearsal.drill.demo import processes_below
from rehearsal.scenarios.scenario import known_scenarios

REPOSITORY = Path(__file__).parents[3]
TOLD = ("bad-gpu",)


def start(folder: Path, *names: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rehearsal", "drill", "--json", "--out", str(folder), *names]
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rehearsed(folder: Path, *names: str, seconds: float) -> list[dict[str, Any]]:
    process = start(folder, *names)
    try:
        printed, said = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
    outcomes: list[dict[str, Any]] = json.loads(printed)
    assert [each for each in outcomes if each["faults"]] == [], said[-3000:]
    assert process.returncode == 0
    assert processes_below(folder) == []
    return outcomes


def test_a_bad_gpu_ends_its_machine_and_the_next_one_finishes_the_run(tmp_path: Path) -> None:
    (outcome,) = rehearsed(tmp_path, "bad-gpu", seconds=800)
    assert (outcome["ends"], outcome["machines"]) == ("equal result", 2)
    assert outcome["guard"] > 0
    assert json.loads((tmp_path / "drills.json").read_text()) == [outcome]


@pytest.mark.slow
def test_every_drill_ends_as_written(tmp_path: Path) -> None:
    others = [each.name for each in known_scenarios() if each.name not in TOLD]
    outcomes = rehearsed(tmp_path, *others, seconds=3 * 3600)
    assert [each["name"] for each in outcomes] == others


@pytest.mark.slow
def test_ctrl_c_in_a_drill_leaves_nothing_running(tmp_path: Path) -> None:
    process = start(tmp_path, "notice")
    try:
        deadline = time.monotonic() + 600
        while not processes_below(tmp_path) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert processes_below(tmp_path) == []
