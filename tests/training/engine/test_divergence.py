"""A run that diverges goes back to its last commit, and only fails when that is in vain."""

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.training import tiny
from tests.training.hooks import at_rank, interrupt_at, notice
from tests.training.runs import AVERAGED, Run, assert_equal
from training.cli.report import _write_event_files
from training.durable.record.history import History
from training.workload import Inputs

NewRun = Callable[[str], Run]


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def poison(
    stage: str, bad: dict[int, int], by: float = math.nan, num_micro_batches: int = 2
) -> None:
    """The loss of these steps of the stage is not finite, the first so many times each."""
    left = {step: times * num_micro_batches for step, times in bad.items()}

    def poisoned(step: int, total: Tensor) -> Tensor:
        if not left.get(step):
            return total
        left[step] -= 1
        return total * by

    tiny.LOSSES[stage] = poisoned


def poison_gradients(stage: str, step: int) -> None:
    """Only the gradients of the stage's step are no numbers, once."""
    left = [1]

    def poisoned(reached: int, total: Tensor) -> Tensor:
        if reached != step or not left[0]:
            return total
        left[0] -= 1
        return total + 0.0 * (0.0 * total).sqrt()  # the slope of a root is infinite at 0

    tiny.LOSSES[stage] = poisoned


@pytest.mark.parametrize(
    "place", [("first", 1), ("first", 11), slow(("first", 7)), slow(("second", 2))]
)
def test_a_transient_nan_costs_only_the_steps_since_the_last_commit(
    run: Run, whole: Run, place: tuple[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the first commit, between two, in a stage's last step, and after a stage's end."""
    poison(place[0], {place[1]: 1})
    assert run.attempt() == 0
    assert_equal(run, whole)
    step = place[1] + 1 + 12 * (place[0] == "second")
    (event,) = run.events("diverged")
    assert (event["step"], event["loss"], event["retry"]) == (step, "nan", 1)
    assert event["gradient_norm"] == "nan"
    assert f"step {step}: the loss is nan, the norm of the gradients nan; retry 1 of 2" in (
        capfd.readouterr().out
    )
    assert run.head.generation == 2
    first, second = History.read(run.store).attempts
    assert (first.ended, second.ended) == ("diverged", "finished")
    assert first.num_repeated == (step - 1) % 12 % 3


def test_gradients_that_are_no_numbers_are_found_where_they_are_clipped(
    run: Run, whole: Run
) -> None:
    poison_gradients("first", 7)
    assert run.attempt() == 0
    assert_equal(run, whole)
    (event,) = run.events("diverged")
    assert event["step"] == 8
    assert math.isfinite(float(event["loss"]))
    assert event["gradient_norm"] == "nan"


def test_a_state_past_a_divergence_is_not_saved(run: Run, whole: Run) -> None:
    """The loss alone is no number, so that a save at the next boundary finds nothing wrong."""
    left = [2]

    def poisoned(step: int, total: Tensor) -> Tensor:
        if step != 4 or not left[0]:
            return total
        left[0] -= 1
        return total + math.inf

    tiny.LOSSES["first"] = poisoned
    assert run.attempt("--usd-per-hour=2") == 0
    assert_equal(run, whole)
    assert min(line["step"] for line in run.lines("step") if line["generation"] == 2) == 4
    assert [a.usd_per_hour for a in History.read(run.store).attempts] == [2, 2]


def test_weights_that_are_no_numbers_are_found_by_the_save(run: Run, new_run: NewRun) -> None:
    """Without clipping nothing else tells, in the last step of a stage."""
    poison_gradients("first", 11)
    run.options = ["--override=clip_norm=none"]
    assert run.attempt() == 0
    (event,) = run.events("diverged")
    assert (event["step"], event["loss"]) == (12, None)
    assert "contains a NaN" in event["message"]
    plain = new_run(f"{run.uri}-plain")
    plain.options = run.options
    tiny.LOSSES.clear()
    assert plain.attempt() == 0
    assert_equal(run, plain)
    assert all("gradient_norm" not in line for line in plain.lines("step"))


def test_fails_when_going_back_is_in_vain(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    poison("first", {7: 3})
    assert run.attempt() == 1
    assert [event["retry"] for event in run.events("diverged")] == [1, 2]
    assert run.head.state == "failed" and run.events("failed")
    assert run.head.reason is not None
    assert "step 8: the loss is nan" in run.head.reason
    assert "the norm of the gradients nan; nothing was published" in capfd.readouterr().err
    assert "2 retries from the last commit got no further" in run.head.reason
    assert [entry.step for entry in run.head.checkpoints] == [3, 6]
    assert run.json("receipt.json")["state"] == "failed"


def test_only_retries_without_progress_are_counted(run: Run, whole: Run) -> None:
    poison("first", {4: 2, 8: 2}, by=math.inf)
    assert run.attempt() == 0
    assert [event["retry"] for event in run.events("diverged")] == [1, 2, 1, 2]
    assert_equal(run, whole)


ALWAYS = 100
SKIPPING = ["--nan-skips=1"]


@pytest.fixture(scope="module")
def skipped(finished: Callable[..., Run]) -> Run:
    """The run that nothing but its bad step interrupts."""
    poison("first", {7: ALWAYS})
    return finished(*SKIPPING, *AVERAGED)


def test_a_step_that_diverges_again_is_left_out(skipped: Run, whole: Run) -> None:
    assert skipped.head.skipped_steps == (8,)
    assert skipped.json("receipt.json")["skipped_steps"] == [8]
    assert (
        b"These steps diverged and were skipped: 8."
        in (Path(skipped.uri) / "report.html").read_bytes()
    )
    lineage = skipped.lineage()
    assert (lineage[8]["loss"], lineage[8]["skipped"]) == (None, True)
    ours, theirs = skipped.losses(), whole.losses()
    assert [ids for *_, ids in ours] == [ids for *_, ids in theirs], "its samples count as seen"
    assert ours[:7] == theirs[:7]


@pytest.mark.parametrize("step", [6, slow(8), slow(13)])
def test_an_interrupted_run_leaves_out_the_same_steps(run: Run, skipped: Run, step: int) -> None:
    """Interrupted on the way to the step a second time, right after it, and in the next stage."""
    run.options = [*SKIPPING, *AVERAGED]
    poison("first", {7: 1})  # only the first attempt has a reason to leave it out
    if step == 6:
        interrupt_on_the_second_pass("first", 6)
    else:
        interrupt_at("first" if step < 12 else "second", step % 12)
    assert run.attempt() == 75
    assert run.attempt("--nan-skips=0") == 0
    assert_equal(run, skipped)
    assert run.head.skipped_steps == (8,)


def interrupt_on_the_second_pass(stage: str, step: int) -> None:
    passes = []

    def hook(reached: int) -> None:
        if reached == step:
            passes.append(reached)
            if len(passes) == 3:  # a step has two micro-batches
                notice()

    tiny.HOOKS[stage] = hook


def test_no_more_steps_are_left_out_than_allowed(run: Run) -> None:
    poison("first", {4: ALWAYS, 7: ALWAYS})
    assert run.attempt("--nan-skips=1") == 1
    assert run.head.skipped_steps == (5,)
    assert run.head.reason is not None
    assert "step 8" in run.head.reason
    assert run.json("receipt.json")["skipped_steps"] == [5]


def test_the_old_model_is_gone_before_the_new_one_is_built(
    run: Run, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[nn.Module]] = []
    build = tiny.TinyTrain.model

    def alone(self: tiny.TinyTrain, i: Inputs) -> nn.Module:
        if self.name == "first":
            assert [model() for model in models] == [None] * len(models)
        model = build(self, i)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(tiny.TinyTrain, "model", alone)

    # Long work that is staged for: what is staged holds the model too.
    poison("first", {5: 1})
    assert run.attempt("--notice-budget-seconds=4") == 0
    assert len(models) == 3
    assert_equal(run, whole)


def test_a_notice_that_meets_a_divergence_leaves_the_last_commit(run: Run, whole: Run) -> None:
    poison("first", {7: 1})
    interrupt_at("first", 7)
    assert run.attempt() == 75
    assert run.head.state == "released"
    assert [entry.step for entry in run.head.checkpoints] == [3, 6]
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_two_ranks_go_back_together(run: Run, pair: Run) -> None:
    """The bad sample is in the share of one of them; the step is the last of an epoch."""
    poison("first", {7: 1}, num_micro_batches=1)
    only_on_rank_1()
    assert run.attempt_with_ranks(2) == [0, 0]
    assert_equal(run, pair)
    assert [event["step"] for event in run.events("diverged")] == [8]


@pytest.mark.slow
def test_two_ranks_leave_out_a_step_together_and_fail_together(run: Run) -> None:
    poison("first", {7: ALWAYS})
    assert run.attempt_with_ranks(2, "--nan-skips=1") == [0, 0]
    assert run.head.skipped_steps == (8,)
    run.uri += "-failed"
    assert run.attempt_with_ranks(2, "--nan-retries=1") == [1, 1]
    assert run.head.state == "failed"


@pytest.mark.slow  # two ranks without shares do so, too
def test_ranks_that_share_a_model_go_back_together(sharded_run: Run, sharded: Run) -> None:
    poison("second", {4: 1}, num_micro_batches=1)
    only_on_rank_1()
    assert sharded_run.attempt_with_ranks(2) == [0, 0]
    assert_equal(sharded_run, sharded)
    assert [event["step"] for event in sharded_run.events("diverged")] == [17]


def only_on_rank_1() -> None:
    """Restrict what `poison` does to one rank of those forked from here."""
    (stage,) = tiny.LOSSES
    poisoned = tiny.LOSSES[stage]
    is_there = [False]
    at_rank(1, (stage, 0), lambda: is_there.__setitem__(0, True))
    tiny.LOSSES[stage] = lambda step, total: poisoned(step, total) if is_there[0] else total


def test_the_gradients_norm_is_recorded_as_clipping_finds_it(
    whole: Run, pair: Run, sharded: Run, tmp_path: Path
) -> None:
    """Once, however many ranks have it; a chart and a curve show it."""
    norms = [float(line["gradient_norm"]) for line in whole.lines("step")]
    assert all(0 < norm < 100 for norm in norms)
    for run in (pair, sharded):
        theirs = [line["gradient_norm"] for line in run.lines("step")]
        # Rounding grows from step to step, with BatchNorm above all.
        assert norms[:12] == pytest.approx(theirs[:12], rel=1e-3)
    assert b'"y_label": "norm of the gradients"' in (Path(whole.uri) / "report.html").read_bytes()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _write_event_files(whole.store, tmp_path / "logs")
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    values = [event.value for event in events.Scalars("first/gradient_norm")]
    assert values == pytest.approx(norms[:12])
