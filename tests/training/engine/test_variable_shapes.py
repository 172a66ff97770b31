"""Batches of any shape on two ranks, some without objects: trained on after a notice, bit for bit.

What a detector asks of the engine.
"""

from collections.abc import Callable
from pathlib import Path

from tests.training.attempt.machine import Clock, Machine
from tests.training.detector import STEPS
from tests.training.runs import Run

OPTIONS = ["--workload=tests.training.detector:DETECTION", "--override=epochs=8"]


def test_two_ranks_train_on_after_a_notice_and_resume_bit_for_bit(
    run: Run, new_run: Callable[[str], Run], tmp_path: Path
) -> None:
    whole = new_run(str(tmp_path / "whole" / "run-1"))
    run.options = whole.options = OPTIONS
    assert whole.attempt_with_ranks(2) == [0, 0]

    machine = Machine(run, tmp_path / "notice.json", Clock())
    machine.seconds = 0.15  # of each of the two ranks in each step
    machine.trains_on_when_one_of_two_is_told(rank=1)
    first, last = machine.commits
    assert last["step"] - first["step"] > len(STEPS), "every kind of step in the extra time"
    machine.go_on(whole, ranks=2)
    assert len(run.lines("step")) == len(run.lineage()), "no step was repeated"

    for line in whole.lineage().values():
        has_objects = "o" in STEPS[line["stage_step"] % len(STEPS) - 1]
        assert (line["metrics"]["objects"] > 0) == has_objects
        # Without objects the loss is the mean term alone: a thousandth of what is below 1.
        assert (line["loss"] > 1e-3) == has_objects
