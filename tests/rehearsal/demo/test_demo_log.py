"""A demo's log is short and says what comes; all of it is in a file."""

import os
import time
from pathlib import Path

import pytest

from rehearsal.demo.demo import COLUMNS, NEWS, DemoLog

BOOT = (
    "[ok] run-env: 18 variables for run run-1 (0.2 s)",
    "     cloudwatch-agent: Configuration validation succeeded",
    "[ok] torch: torch 2.14.1+cu130, 0 GPUs (5.7 s)",
    "[ok] training: training.service started: trajectory, recipe laptop (0.1 s)",
)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def log(tmp_path: Path, said: list[str]) -> DemoLog:
    return DemoLog(said.append, tmp_path / "demo.log", [10.0, 20.0, 5.0])


def test_of_a_boot_only_the_first_machine_s_steps_are_news(log: DemoLog, said: list[str]) -> None:
    for machine in ("i-1", "i-2"):
        for line in BOOT:
            log.hear(f"{machine}: {line}")
        log.hear(f"{machine}: [failed] data-volume: no disk: attach one")
    assert [line[:12] for line in said] == [
        "i-1: [ok] ru", "i-1: [ok] to", "i-1: [ok] tr", "i-1: [failed",
        "i-2: [ok] tr", "i-2: [failed",
    ]  # fmt: skip


def test_the_log_stays_short_and_narrow_and_the_file_has_all(
    log: DemoLog, said: list[str], tmp_path: Path
) -> None:
    for number in range(500):
        log.hear(f"i-1: head: {number}/500 epoch 1/1 loss 2.0")
        log.hear(f"i-1: [checkpoint] step {number}, periodic: 1.3 MB committed in 0.07 s")
        log.hear("cdk deploy TrainingStack: 12/56 | CREATE_COMPLETE | AWS::IAM::Role")
        log.hear(f"i-1: something else that is said {number} times {'x' * 300}")
    log("7/7 the comparison")
    assert len(said) == NEWS + 1
    assert max(map(len, said)) == COLUMNS
    assert sum("head: " in line for line in said) == 1, "progress waits some seconds"
    assert not any("cdk" in line or "checkpoint" in line for line in said)
    assert said[-1] == "7/7 the comparison"
    assert len((tmp_path / "demo.log").read_text().splitlines()) == 2001


def test_each_phase_says_its_place_and_follows_the_machine_s_pace(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 * (os.cpu_count() or 1), 0, 0))
    log = DemoLog(said.append, tmp_path / "demo.log", [10.0, 20.0, 5.0])
    log.begin("deploy")
    now = 140.0
    log.begin("machine 1 of 1")
    now = 145.0
    assert log.pace == 4.0, "a long phase has not made the machine slower"
    log.begin("comparison", is_last=True)
    assert log.pace == 1.5
    assert said == [
        "1/3 deploy: about 30 s, 105 s to the end",
        "2/3 machine 1 of 1: about 80 s, 100 s to the end",
        "3/3 comparison: about 8 s, 8 s to the end",
    ]
