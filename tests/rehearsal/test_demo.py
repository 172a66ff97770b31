"""The whole way, small: the real CLI deploys, machines boot, train, are taken away and finish."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rehearsal.drill.demo import processes_below

Demo = Callable[..., subprocess.Popen[str]]
REPOSITORY = Path(__file__).parents[2]
SMALL = [
    *("--count", "132", "--overrides", "single_frame_epochs=2 epochs=60"),
    *("--notice-seconds", "5", "--lease-ttl-seconds", "3"),
]


@pytest.fixture
def demo() -> Iterator[Demo]:
    """Return a function that starts a demo; none outlives a test that fails."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rehearsal", "demo", "--out", str(folder), *SMALL]
        process = subprocess.Popen(
            [*command, *options],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)


def test_an_interrupted_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, demo: Demo
) -> None:
    process = demo(tmp_path, "--interrupt", "kill:head:30", "--interrupt", "notice:head:60")
    _, said = process.communicate(timeout=800)
    assert process.returncode == 0, said[-3000:]
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["weights_sha256"] == receipt["uninterrupted_weights_sha256"]
    assert receipt["losses_equal"]
    assert receipt["lineage_problems"] == []
    assert receipt["interruptions"] == 2
    # A fast machine comes to the end of the run in what is left of its notice.
    assert receipt["attempts"] in (2, 3)
    assert "notice in head at step" in receipt["interruption_list"][1]["what"]
    assert 0 < receipt["notice_to_commit_seconds"] < 5
    assert receipt["fleet_target_capacity"] == 0
    assert receipt["instances_running"] == 0
    assert receipt["guard_invocations"] > 0
    assert receipt["resources"] == sum(receipt["resources_by_type"].values())
    assert 0 < receipt["usd_spot"] < receipt["usd_on_demand"]
    assert processes_below(tmp_path) == []
    assert "<svg" in (tmp_path / "report.html").read_text()


@pytest.mark.slow  # a drill is interrupted in each run of the tests
def test_ctrl_c_in_the_middle_leaves_nothing_running(tmp_path: Path, demo: Demo) -> None:
    process = demo(tmp_path)
    deadline = time.monotonic() + 600
    while not processes_below(tmp_path) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.2)
    assert processes_below(tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # as impatient people do
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert processes_below(tmp_path) == []
