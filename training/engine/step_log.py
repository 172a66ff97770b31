"""How long steps take, and what is recorded of each: a line in the metrics, the progress bar, and a
divergence.
"""

import math
import time
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from training.attempt.context import AttemptContext
from training.engine.batches import BatchPlan
from training.engine.learner import StepResult
from training.errors import DivergedError, Divergence
from training.record.position import Position
from training.report.bottleneck import StageTimes
from training.report.progress import ProgressBar, readable
from training.workload import Train


class StepTime(NamedTuple):
    """How long a step took, and the share of that spent waiting for data."""

    seconds: float
    waited_share: float


class DeviceTime:
    """How long the device works on what is launched inside of it."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._seconds = 0.0

    def __enter__(self) -> "DeviceTime":
        self._began = time.monotonic()
        if self._events is not None:
            self._events[0].record()
        return self

    def __exit__(self, *error: object) -> None:
        if self._events is not None:
            self._events[1].record()
        self._seconds = time.monotonic() - self._began

    @property
    def seconds(self) -> float:
        """Waits for the device if it has not ended."""
        if self._events is None:
            return self._seconds
        began, ended = self._events
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000


class Pace:
    """Measures each step of a stage."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._waited = 0.0
        self._last_seconds = 0.0
        self._first_ended: float | None = None  # its compilation is not the pace
        self._num_steps = 0  # after the first
        self.longest_seconds: float | None = None  # of recent steps, waiting for data included

    def next(self, wait_seconds: float) -> StepTime:
        """The time of the step that has just ended, given the loader's total wait."""
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        share = min(1.0, (wait_seconds - self._waited) / seconds)
        self._since, self._waited, self._last_seconds = now, wait_seconds, seconds
        if self._first_ended is None:
            self._first_ended = now
        else:
            self._num_steps += 1
        return StepTime(seconds, share)

    def seconds_for(self, num_steps: int) -> float | None:
        """How long so many more steps will take here, with evaluations and commits as so far."""
        if self._first_ended is None or not self._num_steps:
            return None
        return (time.monotonic() - self._first_ended) / self._num_steps * num_steps

    def remember(self) -> None:
        """Count the step that has just ended as typical; slow ones are forgotten slowly."""
        self.longest_seconds = max(self._last_seconds, 0.99 * (self.longest_seconds or 0.0))

    def skip(self) -> None:
        """Leave out what happened since: an evaluation or a commit is not a step."""
        self._since = time.monotonic()


class TimesSoFar:
    """Adds up where the time of a stage's steps went, from what attempts before have left."""

    def __init__(self, before: Mapping[str, float], num_workers: int) -> None:
        self._times = StageTimes(**before)
        self._num_workers = num_workers
        self._is_first = True

    def add(
        self, num_samples: int, time: StepTime, computed: float, made: Mapping[str, float]
    ) -> None:
        """Add a step: its samples, what the device took, and the loader's seconds by part."""
        waited = time.seconds * time.waited_share
        if self._is_first:
            self._is_first = False
            self._times = self._times.plus(first_waited_seconds=waited)
            return
        self._times = self._times.plus(
            samples=num_samples,
            seconds=time.seconds,
            waited_seconds=waited,
            computed_seconds=min(computed, time.seconds),
            loader_seconds=self._num_workers * time.seconds,
            **{f"{part}_seconds": seconds for part, seconds in made.items()},
        )

    def to_json(self) -> dict[str, float]:
        """For a checkpoint's position, from which the next attempt goes on."""
        return self._times.to_json()


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
            f"{readable(rate)} samples/s, {time.waited_share:.0%} waiting for data"
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
