"""After the commit at a notice training continues, and a last save comes as late as is safe."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training import tiny
from tests.training.durable.attempt.machine import LONG, NOTICE, Clock, Machine
from tests.training.hooks import HUNG_SECONDS, send
from tests.training.runs import Run, assert_equal, wait_for
from training.durable.attempt.notice import ExtraTime, Interruption, Notice
from training.durable.record.history import History
from training.durable.store.folder import FolderStore


@pytest.fixture(scope="module")
def long_whole(finished: Callable[..., Run]) -> Run:
    """The uninterrupted run of a number of epochs."""
    return finished(*LONG)


@pytest.fixture
def machine(run: Run, tmp_path: Path) -> Machine:
    run.options = LONG
    return Machine(run, tmp_path / "notice.json", Clock())


def test_training_goes_on_and_is_committed_again(machine: Machine, long_whole: Run) -> None:
    machine.notice_at("first", 8)
    left = machine.attempt()
    assert 0.05 * NOTICE < left < 0.5 * NOTICE
    first, last = machine.commits
    assert first["notice_to_commit_seconds"] < 0.5 * NOTICE
    assert "notice_to_commit_seconds" not in last
    assert last["gained_steps"] == last["step"] - first["step"] > 5
    assert last["step"] == machine.last_step == machine.run.head.checkpoints[-1].step
    assert len(machine.run.events("notice")) == 1
    machine.go_on(long_whole)
    assert len(machine.run.lines("step")) == len(machine.run.lineage()), "no step was repeated"


def test_a_policy_of_stopping_stops(machine: Machine) -> None:
    machine.notice_at("first", 8)
    assert machine.attempt("--notice-policy=stop") > 0.5 * NOTICE
    assert [event["step"] for event in machine.commits] == [9]


def test_a_notice_without_a_time_stops(machine: Machine) -> None:
    machine.notice_at("first", 8)
    machine.options.remove(f"--notice-file={machine.notice_file}")
    assert machine.attempt() > 0.5 * NOTICE
    assert [event["step"] for event in machine.commits] == [9]


def test_a_shutdown_in_the_extra_time_ends_it_at_once(machine: Machine, long_whole: Run) -> None:
    machine.notice_at("first", 8, then={11: lambda: send(signal.SIGTERM)})
    assert machine.attempt() > 0.5 * NOTICE
    assert [event["step"] for event in machine.commits] == [9, 12]
    machine.go_on(long_whole)


def test_a_step_that_is_suddenly_slow_loses_only_the_extra_time(
    machine: Machine, long_whole: Run
) -> None:
    def stall() -> None:
        machine.pass_time_until(left=0.1)
        time.sleep(600)

    machine.notice_at("first", 8, then={13: stall})
    assert machine.attempt() == pytest.approx(0.1), "without waiting for the step"
    assert machine.run.head.checkpoints[-1].step == 9
    assert [event["step"] for event in machine.commits] == [9]
    machine.go_on(long_whole)


def test_a_store_that_stalls_in_the_last_save_loses_only_the_extra_time(
    machine: Machine, long_whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    def stall(*arguments: Any) -> Any:
        machine.pass_time_until(left=0.1)
        time.sleep(600)

    machine.notice_at("first", 8, then={12: lambda: setattr(FolderStore, "upload", stall)})
    machine.attempt()
    assert "the upload was too slow; the last commit stays" in capfd.readouterr().out
    assert machine.run.head.checkpoints[-1].step == 9
    assert machine.last_step > 14
    machine.go_on(long_whole)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_ranks_end_at_the_same_step(machine: Machine, rank: int, long_whole: Run) -> None:
    machine.trains_on_when_one_of_two_is_told(rank)
    machine.go_on(long_whole, ranks=2)
    assert len(machine.run.lines("step")) == len(machine.run.lineage()), "no step was repeated"


def test_an_evaluation_that_still_fits_is_begun_anew(machine: Machine, long_whole: Run) -> None:
    seen: list[int] = []

    def act(size: int) -> None:
        seen.append(size)
        if len(seen) == 5:  # the second batch of the second evaluation
            machine.notice()

    machine.at("first-evaluation", act)
    machine.attempt()
    first, last = machine.commits
    assert first["step"] == 8
    assert last["gained_steps"] > 4
    machine.go_on(long_whole)


def test_an_evaluation_that_was_never_measured_is_not_begun(machine: Machine) -> None:
    machine.notice_at("first-evaluation", 5)
    assert machine.attempt() > 0.5 * NOTICE
    assert machine.run.head.checkpoints[-1].step == 4


def test_without_compilation_a_shape_that_was_never_seen_is_a_step_like_any_other(
    machine: Machine, long_whole: Run
) -> None:
    machine.notice_at("first", 2)  # the odd last batch of the first epoch is the next
    machine.attempt()
    first, last = machine.commits
    assert (first["step"], last["step"]) == (3, 4), "on to an evaluation that was never measured"
    machine.go_on(long_whole)


def test_the_end_of_a_stage_is_committed_and_the_next_not_begun(
    machine: Machine, long_whole: Run
) -> None:
    machine.seconds = 0.005
    machine.notice_at("first", 94)
    assert machine.attempt() > 0.3 * NOTICE
    newest = machine.run.head.checkpoints[-1]
    assert (newest.kind, newest.step) == ("stage-end", 100)
    (first,) = machine.commits
    story = History.read(machine.run.store).attempts[0]
    assert story.gained_steps == 100 - first["step"] > 0
    machine.go_on(long_whole)
    assert len(machine.run.lines("step")) == len(machine.run.lineage()), "no step was repeated"


def test_a_run_may_finish_in_the_extra_time(machine: Machine, long_whole: Run) -> None:
    machine.seconds = 0.005
    machine.notice_at("second", 6)
    process = machine.run.fork(*machine.options)
    process.join(HUNG_SECONDS)
    assert process.exitcode == 0
    assert_equal(machine.run, long_whole)


def test_shards_that_still_fit_are_made(machine: Machine, long_whole: Run) -> None:
    machine.notice_at("shard", 1)
    machine.attempt()
    assert [line["shard"] for line in machine.run.lines("prepare")] == [0, 1, 2]
    assert machine.run.lines("step") == []
    machine.go_on(long_whole)


def test_a_machine_that_waits_is_let_in_early(machine: Machine, long_whole: Run) -> None:
    """The candidate is another process; it tells the holder by an object in the store."""

    def act(step: int) -> None:
        if step == 8:
            machine.notice()
            # From here on the clock all but stands still: no time runs out, and only somebody who
            # waits ends this attempt.
            machine.seconds = 1e-6
            (machine.notice_file.parent / "noticed").touch()
        if step > 8:
            time.sleep(0.1)

    machine.at("first", act)
    # The holder has a heartbeat, so that nobody else lets the candidate in.
    holder = machine.run.fork(*machine.options, "--lease-ttl-seconds=30")
    wait_for((machine.notice_file.parent / "noticed").exists)
    tiny.HOOKS.clear()
    machine.run.at_start = None
    candidate = machine.run.fork("--lease-ttl-seconds=30")
    holder.join(HUNG_SECONDS)
    assert holder.exitcode == 75
    assert machine.run.json("waiting.json")["generation"] == 1
    assert machine.last_step < 100, "it did not train on to the end of the stage"
    candidate.join(HUNG_SECONDS)
    assert candidate.exitcode == 0
    assert_equal(machine.run, long_whole)


def extra_time(seconds: float, **notice: Any) -> ExtraTime:
    interruption = Interruption(budget_seconds=120)
    now = time.monotonic()
    known = {"cause": "notice", "is_dated": True, **notice}
    interruption.notice = Notice(received=now, deadline=now + seconds, **known)
    return ExtraTime(interruption, "train-on")


@pytest.mark.parametrize(
    ("work", "save", "first", "is_allowed"),
    [
        # Of 100 s: 10 s are kept, and half more than what is measured is reckoned with.
        (1.0, 50.0, 0.0, True),
        (15.0, 50.0, 0.0, False),
        (1.0, 30.0, 30.0, True),
        (1.0, 40.0, 40.0, False),
        (None, 1.0, 0.0, False),
        (1.0, None, 0.0, False),
    ],
)
def test_what_may_begin_is_reckoned_with_reserves(
    work: float | None, save: float | None, first: float, is_allowed: bool
) -> None:
    assert extra_time(100).would_allow(work, save, first) is is_allowed


def test_nothing_begins_where_the_end_is_not_known_or_another_waits() -> None:
    assert not extra_time(100, is_dated=False).would_allow(1.0, 1.0)
    assert not extra_time(100, cause="shutdown").would_allow(1.0, 1.0)
    wanted = extra_time(100)
    assert wanted.would_allow(1.0, 1.0)
    wanted.is_lease_wanted = True
    assert not wanted.would_allow(1.0, 1.0)
