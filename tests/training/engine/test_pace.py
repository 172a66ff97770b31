"""Where the time of steps went is added up over attempts, without the first step of each."""

import signal

import pytest
import torch

from contract.errors import Exit
from tests.training.hooks import interrupt_at
from tests.training.runs import Run
from training.engine import step_log
from training.engine.step_log import DeviceTime, Pace, StepTime, TimesSoFar, evaluations_ahead


def test_the_first_step_of_an_attempt_counts_only_as_waited_for() -> None:
    times = TimesSoFar({}, 3)
    times.add(8, StepTime(10.0, 0.5), 4.0, {"read": 1.0})
    times.add(8, StepTime(2.0, 0.25), 1.0, {"read": 0.5, "decode": 2.0})
    again = TimesSoFar(times.to_json(), 1)
    again.add(8, StepTime(6.0, 0.5), 2.0, {"read": 7.0})
    again.add(4, StepTime(1.0, 0.0), 3.0, {})
    told = {name: value for name, value in again.to_json().items() if value}
    assert told == {
        "samples": 12,
        "seconds": 3,
        "waited_seconds": 0.5,
        "computed_seconds": 2,  # never more than the step took
        "first_waited_seconds": 8,
        "loader_seconds": 7,
        "read_seconds": 0.5,
        "decode_seconds": 2,
    }


def test_the_pace_leaves_out_what_steps_wait_while_the_dataset_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(step_log.time, "monotonic", lambda: now[0])
    pace, waited = Pace(), 0.0
    # A first step, four that wait for the sync, one that its end finds waiting for the loader.
    for seconds, waits, is_arriving in [(30, 20, True), *[(10, 8, True)] * 4, (3, 1, False)]:
        now[0], waited = now[0] + seconds, waited + waits
        pace.next(waited, is_arriving=is_arriving)
    assert pace.seconds_for(100) == pytest.approx(100 * (4 * 2 + 3) / 5)


def test_evaluations_are_no_part_of_the_pace_and_known_from_the_plan_or_earlier_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(step_log.time, "monotonic", lambda: now[0])
    pace, times = Pace(), TimesSoFar({}, 0)
    for _ in range(3):
        now[0] += 10
        pace.next(0.0)
    now[0] += 600
    pace.pass_over(600)
    times.add_evaluation(600)
    assert pace.seconds_for(7) == pytest.approx(70)
    # Of the plan's, each 100 steps, or of what one took.
    for before, num_steps, evaluations, seconds in (
        ({}, 50, 0, 500),
        ({}, 50, 1, 500 + 200),
        ({}, 0, 1, 200),
        (times.to_json(), 50, 3, 500 + 3 * 600),
        (times.to_json(), 0, 0, 0),
    ):
        found = TimesSoFar(before, 0).seconds_for(
            num_steps, pace, evaluations=evaluations, every=100, planned=0.2
        )
        assert found == pytest.approx(seconds)
    assert TimesSoFar({}, 0).seconds_for(5, Pace(), evaluations=1, every=9, planned=0) is None


@pytest.mark.parametrize(
    ("step", "num_steps", "every", "is_due", "count"),
    [
        (126, 22, 21, True, 3),  # of seed 50339: its own, that of 147, and the last
        (126, 22, 21, False, 2),
        (127, 19, 21, False, 0),
        (147, 1, 21, False, 1),
        (148, 0, 21, True, 1),
        (148, 0, 21, False, 0),
        (105, 21, 21, False, 1),
        (0, 148, 0, False, 1),
        (0, 147, 0, False, 0),
        (0, 148, 74, False, 2),
    ],
)
def test_evaluations_are_counted_one_by_one(
    step: int, num_steps: int, every: int, is_due: bool, count: int
) -> None:
    ahead = evaluations_ahead(step, num_steps, every=every, last=148, is_due=is_due)
    assert ahead == count


def test_a_commit_before_the_first_evaluation_says_what_is_left_with_those_of_the_plan(
    run: Run,
) -> None:
    interrupt_at("first", 3, signal.SIGTERM)
    plan = "--prediction=share_useful=0.1 share_evaluation=9e5"
    assert run.attempt(plan) == Exit.INTERRUPTED
    assert run.json("head.json")["checkpoints"][-1]["seconds_left"] > 1e4


@pytest.mark.parametrize(("interval", "is_slow"), [("100steps", True), ("1steps", False)])
def test_until_an_attempt_has_committed_what_is_left_is_told_at_an_earlier_pace(
    run: Run, interval: str, is_slow: bool
) -> None:
    """A few steps without a commit look fast: the run left for Spot, and lost its deadline."""
    interrupt_at("first", 3, signal.SIGTERM)
    plan = "--prediction=share_useful=0.1 share_evaluation=9e5"
    assert run.attempt(plan) == Exit.INTERRUPTED
    interrupt_at("first", 6, signal.SIGTERM)
    assert run.attempt(f"--checkpoint-interval={interval}") == Exit.INTERRUPTED
    assert (run.json("head.json")["checkpoints"][-1]["seconds_left"] > 1e3) is is_slow


def test_a_finished_run_says_what_it_was_bound_by(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt_at("second", 3, signal.SIGTERM)
    assert run.attempt("--override=loader_workers=1") == Exit.INTERRUPTED
    assert run.attempt() == 0
    receipt = run.json("receipt.json")
    steps = run.lineage().values()
    whole = {
        name: sum(line["num_samples"] for line in steps if line["stage"] == name)
        for name in ("first", "second")
    }
    told = {stage: times["samples"] for stage, times in receipt["times"].items()}
    assert 0 < told["first"] < whole["first"], "without the first step of its only attempt"
    assert 0 < told["second"] < whole["second"] - 8, "without the first steps of both"
    for times in receipt["times"].values():
        assert 0 < times["computed_seconds"] + times["waited_seconds"] <= times["seconds"]
        assert times["make_seconds"] > 0
    assert receipt["bottleneck"].startswith("stage '")
    assert f"[bottleneck] {receipt['bottleneck']}" in caplog.messages
    page = run.store.get("report.html")
    assert page is not None
    assert b"<td>bottleneck</td>" in page.data


@pytest.mark.gpu
def test_the_time_of_a_gpu_is_that_of_its_work_not_of_its_launch() -> None:
    device = torch.device("cuda", 0)
    busy = torch.ones(8192, 8192, device=device)
    busy = busy @ busy
    torch.cuda.synchronize()
    with DeviceTime(device) as launched:
        for _ in range(100):
            busy = busy @ busy / 8192
    assert launched.seconds > 10 * launched._seconds
