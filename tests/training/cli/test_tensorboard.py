"""TensorBoard of a live run: it shows the lineage, and stops with the run."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.training import tiny
from tests.training.forked import ForkedTrainer
from tests.training.runs import Run, wait_for
from training.cli.report import _EventFiles, _Follower
from training.durable.store.folder import FolderStore

pytest.importorskip("tensorboard")

NewRun = Callable[[str], Run]


def slow(number: int) -> None:
    """So that the run is still going on when the follower has imported what it needs."""
    time.sleep(0.4)


def scalars(out: Path, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard itself reads them."""
    if not list(out.glob("events.out.*")):
        return []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out), size_guidance={"scalars": 0})
    events.Reload()
    if tag not in events.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.fixture
def follow(run: Run, tmp_path: Path) -> Iterator[Callable[[Run], ForkedTrainer]]:
    """Start `tensorboard --follow` in a separate process, which writes to `said`."""
    processes = []

    def start(run: Run) -> ForkedTrainer:
        command = [sys.executable, "-m", "training", "tensorboard", f"--run-uri={run.uri}"]
        command += [f"--out={tmp_path / 'logs'}", "--follow", "--poll-seconds=0.2"]
        with (tmp_path / "said").open("wb") as said:
            process = ForkedTrainer(
                command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda process=process: process.poll() is not None)  # type: ignore[misc]


@pytest.mark.parametrize(
    # Reading from S3: tests/training/durable/record and tests/training/store.
    "store_uri",
    ["folder", pytest.param("s3", marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_run_is_followed_through_an_interruption_to_its_end(
    store_uri: str,
    new_run: NewRun,
    follow: Callable[[Run], ForkedTrainer],
    tmp_path: Path,
) -> None:
    run, out = new_run(store_uri), tmp_path / "logs"
    run.options = ["--override=epochs=10", "--override=second_epochs=2"]
    run.options.append("--checkpoint-interval=1000steps")
    tiny.HOOKS["first"] = slow
    first = run.fork()
    wait_for(lambda: run.store.get("head.json") is not None)
    follower = follow(run)
    # What is written every five seconds is seen long before the run's end.
    wait_for(lambda: bool(scalars(out, "first/loss")))
    assert follower.poll() is None
    first.kill()
    first.join()
    shown = [step for step, _ in scalars(out, "first/loss")]
    assert shown == list(range(1, len(shown) + 1))
    tiny.HOOKS.clear()
    # Nothing was committed: the second attempt takes every step back.
    assert run.attempt() == 0
    wait_for(lambda: follower.poll() is not None)
    assert follower.returncode == 0
    assert re.search(r"\[ok\] .*logs: [0-9]+ values", (tmp_path / "said").read_text())
    lineage = run.lineage()
    for stage, steps in (("first", range(1, 41)), ("second", range(41, 49))):
        found = scalars(out, f"{stage}/loss")
        assert [step for step, _ in found] == list(steps)
        assert [value for _, value in found] == pytest.approx(
            [lineage[step]["loss"] for step in steps]
        )
    assert len(scalars(out, "first/validation/accuracy")) == 10
    assert len(list(out.glob("events.out.*"))) == 2, "the second file takes back steps of the first"


def test_ctrl_c_ends_the_following_and_not_the_run(
    run: Run, follow: Callable[[Run], ForkedTrainer], tmp_path: Path
) -> None:
    tiny.HOOKS["first"] = slow
    process = run.fork("--override=epochs=10")
    wait_for(lambda: run.store.get("head.json") is not None)
    follower = follow(run)
    wait_for(lambda: bool(scalars(tmp_path / "logs", "first/loss")))
    os.kill(follower.pid, signal.SIGINT)
    wait_for(lambda: follower.poll() is not None)
    assert follower.returncode == 0
    assert "[tensorboard] stopped; the run continues" in (tmp_path / "said").read_text()
    assert process.is_alive()
    process.kill()
    process.join()


class Lines:
    """Objects of a run's metrics, as its attempts put them there."""

    def __init__(self, root: Path) -> None:
        self.store = FolderStore(root / "run")
        self.files = _EventFiles(root / "logs")
        self.follower = _Follower(self.store, self.files)
        self.out = root / "logs"

    def put(self, generation: int, number: int, *lines: str) -> None:
        data = "".join(f'{{"generation": {generation}, {line}}}\n' for line in lines)
        self.store.put(f"metrics/{generation:04d}-aa-{number:05d}.jsonl", data.encode())

    def shown(self) -> dict[int, float]:
        self.follower.poll()
        return dict(scalars(self.out, "a/loss"))


def resume(step: int) -> str:
    return f'"kind": "resume", "step": {step}'


def step(number: int, loss: float) -> str:
    return f'"kind": "step", "stage": "a", "step": {number}, "loss": {loss}'


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    lines = Lines(tmp_path)
    with lines.files:
        yield lines


def test_steps_are_taken_back_where_the_next_attempt_began(lines: Lines) -> None:
    lines.put(1, 1, resume(0), step(1, 1.0), step(2, 2.0), step(3, 3.0))
    assert lines.shown() == {1: 1.0, 2: 2.0, 3: 3.0}
    lines.put(2, 1, resume(1))
    assert lines.shown() == {1: 1.0}
    lines.put(2, 2, step(2, 20.0))
    assert lines.shown() == {1: 1.0, 2: 20.0}


def test_what_a_stale_attempt_writes_late_is_not_shown(lines: Lines) -> None:
    lines.put(1, 1, resume(0), step(1, 1.0))
    lines.put(2, 1, resume(1), step(2, 20.0))
    assert lines.shown() == {1: 1.0, 2: 20.0}
    lines.put(1, 2, step(2, 2.0), step(3, 3.0))
    assert lines.shown() == {1: 1.0, 2: 20.0}


def test_an_object_that_is_late_is_waited_for(lines: Lines) -> None:
    lines.put(1, 1, resume(0), step(1, 1.0))
    lines.put(1, 3, step(3, 3.0))
    assert lines.shown() == {1: 1.0}
    lines.put(1, 2, step(2, 2.0))
    assert lines.shown() == {1: 1.0, 2: 2.0, 3: 3.0}
    lines.put(1, 5, step(5, 5.0))
    lines.follower.poll(is_last=True)
    assert dict(scalars(lines.out, "a/loss")).keys() == {1, 2, 3, 5}
