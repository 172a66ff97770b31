"""The same drill on process machines and on machines with systemd and cloud-init."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rehearsal.machines.nspawn.root_image import root_image
from tests.rehearsal.conftest import machines_below
from tests.rehearsal.machines.nspawn.conftest import left_behind

# Durations, and what is made from them: a checkpoint's JSON has some, with more digits or fewer.
TIMES = {
    "seconds",
    "last_attempt_seconds",
    "bottleneck",
    "times",
    "spent",
    "goodput",
    "checkpoint_bytes",
}
# Made up by each embedded AWS: instances, buckets.
NAMES = {"writer", "bundle_uri"}
DRILL = """
about = "The first machine is killed in mid-training: the second finishes"

[parameters]
overrides = "tracker_epochs=1 single_frame_epochs=1 shuffled_epochs=1 epochs=10"

[[action]]
at = "head:30"
do = "kill"

[expect]
ends = "equal result"
machines = 2
"""


@pytest.mark.machine
@pytest.mark.slow
def test_a_drill_leaves_the_same_receipt_on_both_but_for_times(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]]
) -> None:
    root_image(print)
    drill = tmp_path / "killed.toml"
    drill.write_text(DRILL)
    ended = {kind: run(rehearse, kind, tmp_path / kind, drill) for kind in ("process", "nspawn")}
    (ours,), theirs = ended["process"], ended["nspawn"][0]
    kept = ("name", "about", "ends", "machines", "faults")
    assert {name: ours[name] for name in kept} == {name: theirs[name] for name in kept}
    assert ours["faults"] == []
    first, second = (receipt(tmp_path / kind) for kind in ("process", "nspawn"))
    assert first.keys() == second.keys()
    assert first["writer"] != second["writer"]
    assert Path(first["bundle_uri"]).name == Path(second["bundle_uri"]).name, "the same code"
    assert first["checkpoint_bytes"] == pytest.approx(second["checkpoint_bytes"], abs=100)
    without = TIMES | NAMES
    assert {k: v for k, v in first.items() if k not in without} == {
        k: v for k, v in second.items() if k not in without
    }
    assert left_behind(tmp_path) == []


def run(
    rehearse: Callable[..., subprocess.Popen[str]], kind: str, folder: Path, drill: Path
) -> list[dict[str, Any]]:
    process = rehearse("drill", "--json", "--machine", kind, "--out", str(folder), str(drill))
    printed, said = process.communicate(timeout=1800)
    assert process.returncode == 0, said[-3000:]
    found: list[dict[str, Any]] = json.loads(printed)
    return found


def receipt(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "killed/receipt.json").read_text())
    return found


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_drill_that_is_stopped_leaves_nothing_and_the_next_one_ends_as_written(
    number: signal.Signals,
    tmp_path: Path,
    rehearse: Callable[..., subprocess.Popen[str]],
    stop_once_a_machine_runs: Callable[[subprocess.Popen[str], Path], str],
) -> None:
    root_image(print)
    drill = tmp_path / "killed.toml"
    drill.write_text(DRILL)
    arguments = ("drill", "--machine", "nspawn", "--out", str(tmp_path / "nspawn"), str(drill))
    process = rehearse(*arguments)
    if number == signal.SIGINT:
        stop_once_a_machine_runs(process, tmp_path)
    else:
        kill_once_a_machine_runs(process, tmp_path)
    assert left_behind(tmp_path) == []
    assert run(rehearse, "nspawn", tmp_path / "nspawn", drill)[0]["faults"] == []
    assert left_behind(tmp_path) == []


def kill_once_a_machine_runs(process: subprocess.Popen[str], folder: Path) -> None:
    """Send SIGKILL; what nobody waits for may end a moment later."""
    while not machines_below(folder):
        assert process.poll() is None
        time.sleep(0.2)
    process.kill()
    process.communicate()
    give_up_at = time.monotonic() + 60
    while left_behind(folder) and time.monotonic() < give_up_at:
        time.sleep(0.1)
