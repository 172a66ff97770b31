"""What is recorded of each step: its line in the metrics, the progress bar, and a divergence."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from training.attempt.context import AttemptContext
from training.engine.batches import BatchPlan
from training.engine.learner import StepResult
from training.engine.pace import StepTime
from training.errors import DivergedError, Divergence
from training.record.position import Position
from training.report.progress import ProgressBar
from training.workload import Train


class StepLog:
    """Records the steps of one stage, each once its numbers are on the host."""

    def __init__(
        self, context: AttemptContext, stage: Train, plan: BatchPlan, first_step: int
    ) -> None:
        self._context = context
        self._stage = stage
        self._plan = plan
        self.bar = ProgressBar(stage.name, plan.num_steps, first_step)

    def record(
        self, position: Position, result: StepResult, time: StepTime, counts: Mapping[str, int]
    ) -> None:
        """Record the step that ended at `position`; DivergedError if its numbers are no numbers.

        `counts` is what its samples counted while they were made.
        """
        loss, norm, metrics = result.read()
        # Where the loss scaler skipped the step, an infinite norm is what it scales down for.
        is_norm_bad = norm is not None and not math.isfinite(norm) and not result.is_skipped
        if not math.isfinite(loss) or is_norm_bad:
            message = f"stage {position.stage!r}, step {position.step}: the loss is {loss}"
            if norm is not None:
                message += f", the norm of the gradients {norm:g}"
            raise DivergedError(
                Divergence(step=position.step, message=message, loss=loss, gradient_norm=norm)
            )
        more: dict[str, Any] = {"metrics": metrics} if metrics else {}
        if counts:
            more["counts"] = dict(counts)
        if norm is not None:
            more["gradient_norm"] = norm
        if result.is_skipped:
            more["skipped"] = True
        self._write(position, time, loss=loss, lr=result.learning_rate, **more)
        if self.bar.is_due or position.stage_step == self._plan.num_steps:
            self._show(position, time, loss, result.learning_rate)

    def record_skipped(self, position: Position, time: StepTime) -> None:
        """Record a step that was left out: a line without a loss."""
        self._write(position, time, loss=None, skipped=True)

    def _write(self, position: Position, time: StepTime, **numbers: Any) -> None:
        step = position.stage_step - 1
        ids = self._plan.ids(step)
        self._context.metrics.write(
            "step",
            stage=self._stage.name,
            step=position.step,
            stage_step=position.stage_step,
            epoch=self._plan.epoch(step),
            samples_per_second=round(len(ids) / time.seconds, 2),
            data_wait=round(time.waited_share, 4),
            **sample_digest(ids, self._plan.num_samples),
            **numbers,
        )

    def _show(self, position: Position, time: StepTime, loss: float, learning_rate: float) -> None:
        step = position.stage_step - 1
        epoch, rate = self._plan.epoch(step) + 1, len(self._plan.ids(step)) / time.seconds
        text = (
            f"epoch {epoch}/{self._plan.num_epochs} loss {loss:.4f} lr {learning_rate:.2e} "
            f"{rate:.0f} samples/s, {time.waited_share:.0%} waiting for data"
        )
        self.bar.show(position.stage_step, f"{text}{self._context.meter_text()}")


def sample_digest(ids: Any, split_samples: int) -> dict[str, int | str]:
    """Count and digests of a step's ids (integers in any sequence), and how many its split has.

    `ids_sum` is the same in any order, `ids_crc` is not (contract/samples.py).
    """
    array = np.asarray(ids, dtype=np.uint64)
    mixed = (array + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    total = int((mixed ^ mixed >> np.uint64(31)).sum())
    return {
        "num_samples": len(array),
        "split_samples": split_samples,
        "ids_sum": f"{total:016x}",
        "ids_crc": f"{zlib.crc32(array.astype('<u8').tobytes()):08x}",
    }
