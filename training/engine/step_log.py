"""The duration and record of each step, and a stage's bottleneck: what its time went into.

A loader that keeps up has its batches ready: without waiting, data is not the bottleneck. If the
trainer waits, the work of the loader's processes shows what for.
"""

import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from contract.readable import readable
from training.durable import AttemptContext, DivergedError, Divergence, Position, ProgressBar
from training.engine.batches import BatchPlan
from training.engine.learner import StepResult
from training.workload import Train

_Bound: TypeAlias = Literal["GPU", "CPU", "host", "decode", "make", "disk", "network"]

# Waiting for data that costs less than this is not a bottleneck.
_WAITED_SHARE = 0.05
# Workers less busy than this have batches ready: handing them over takes longer than a step.
_BUSY_SHARE = 0.5
_DIGESTS_AHEAD = 64
_BOUND_OF: Mapping[str, _Bound] = {
    "sync": "network",
    "read": "disk",
    "decode": "decode",
    "make": "make",
}
_WHAT: Mapping[_Bound, str] = {
    "GPU": "the GPU",
    "CPU": "the CPU's arithmetic",
    "host": "the host",
    "decode": "decoding",
    "make": "making samples",
    "disk": "the disk",
    "network": "the network, through the sync",
}
_ADVICE: Mapping[_Bound, str] = {
    "GPU": "A faster GPU or less work per sample would change it; more vCPUs, a faster disk or "
    "network would not.",
    "CPU": "A GPU or more threads would change it; a faster disk or network would not.",
    "host": "Larger micro-batches or compile_mode would change it: a step then has more to do.",
    "decode": "More vCPUs per GPU (another size) or smaller images (resized when they are packed) "
    "would change it.",
    "make": "More vCPUs per GPU (another size) or less work in the samples' `get` and `collate` "
    "would change it.",
    "disk": "A volume of more throughput, instance-store NVMe, memory that holds the dataset or "
    "smaller samples would change it.",
    "network": "A size with more network bandwidth or a smaller dataset would change it; once the "
    "sync is complete, nothing waits for it.",
}
_ALONE = "Loader workers (loader_workers=auto) would make batches while the device computes."


@dataclass(kw_only=True, slots=True)
class _StageTimes:
    """Where the time of a stage's steps went, over all attempts, as rank 0 measured it.

    The first step of an attempt is left out: it compiles, and its queues are empty. `*_seconds` of
    the loader are added up over its workers, or are the trainer's own if there are none.
    """

    samples: float = 0.0
    seconds: float = 0.0  # of the steps, without evaluations and commits
    waited_seconds: float = 0.0  # of these, for data
    computed_seconds: float = 0.0  # of these, the device worked on steps
    first_waited_seconds: float = 0.0  # before the first step of each attempt
    loader_seconds: float = 0.0  # that the workers had: their number x seconds
    evaluations: float = 0.0
    evaluated_seconds: float = 0.0  # of these, not of the steps
    sync_seconds: float = 0.0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    make_seconds: float = 0.0

    @property
    def starved_seconds(self) -> float:
        """Seconds the device waited for data: on a GPU the trainer may wait while it computes."""
        return min(self.waited_seconds, self.seconds - self.computed_seconds)

    @property
    def by_part(self) -> dict[str, float]:
        """The loader's seconds by what it did."""
        return {part: getattr(self, f"{part}_seconds") for part in _BOUND_OF}

    def to_json(self) -> dict[str, float]:
        """Return the fields, rounded to microseconds."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


def bottleneck(times: _StageTimes, device: str) -> _Bound | None:
    """Return what bounds steps on a device ("cuda" or "cpu"); None before there are two steps."""
    if not times.seconds:
        return None
    parts = times.by_part
    is_loader_busy = sum(parts.values()) >= _BUSY_SHARE * times.loader_seconds
    # A CPU that makes its own batches computes no steps at that time: the larger part bounds it.
    is_by_turns = device == "cpu" and not times.loader_seconds
    least = times.computed_seconds if is_by_turns else _WAITED_SHARE * times.seconds
    if times.starved_seconds >= least and is_loader_busy:
        return _BOUND_OF[max(parts, key=lambda part: parts[part])]
    if times.computed_seconds < 0.5 * times.seconds:
        return "host"
    return "GPU" if device == "cuda" else "CPU"


def sentence(stage: str, times: _StageTimes, device: str) -> str | None:
    """Return the bottleneck with the figures behind it, and what would change it."""
    bound = bottleneck(times, device)
    if bound is None:
        return None
    seconds = times.seconds
    text = (
        f"stage {stage!r} is bound by {_WHAT[bound]}: of its steps' time "
        f"{times.computed_seconds / seconds:.0%} was computing and "
        f"{times.starved_seconds / seconds:.0%} waiting for data, at "
        f"{readable(times.samples / seconds)} samples/s. {_loader(times)}"
    )
    if times.first_waited_seconds >= max(1.0, 0.01 * seconds):
        text += f" It waited {times.first_waited_seconds:.0f} s for data before the first steps."
    is_alone = not times.loader_seconds and times.starved_seconds >= _WAITED_SHARE * seconds
    return f"{text} {_ALONE if is_alone else _ADVICE[bound]}"


def _loader(times: _StageTimes) -> str:
    """Say what the loader did, and what it could do."""
    parts = {part: seconds for part, seconds in times.by_part.items() if seconds}
    total = sum(parts.values())
    if not total:
        return "The loader was idle."
    named = {
        "sync": "waiting for the sync",
        "read": "reading",
        "decode": "decoding",
        "make": "the rest",
    }
    shares = ", ".join(f"{seconds / total:.0%} {named[part]}" for part, seconds in parts.items())
    if not times.loader_seconds:
        return f"The trainer made its batches itself ({shares})."
    workers = times.loader_seconds / times.seconds
    busy = min(1.0, total / times.loader_seconds)
    could = readable(times.samples / times.seconds / busy)
    return (
        f"{workers:.2g} loader worker{' was' if workers == 1 else 's were'} busy {busy:.0%} of it "
        f"({shares}) and could make {could} samples/s."
    )


def longest(times: Mapping[str, Mapping[str, Any]]) -> tuple[str, _StageTimes] | None:
    """Return the stage that took the most time, from the results of `to_json` by stage."""
    of_stage = {stage: _StageTimes(**numbers) for stage, numbers in times.items()}
    if not of_stage:
        return None
    return max(of_stage.items(), key=lambda one: one[1].seconds)


class StepTime(NamedTuple):
    """How long a step took, and the share of that spent waiting for data."""

    seconds: float
    waited_share: float


class DeviceTime:
    """Measures how long the device works on what is launched inside the context."""

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
        """The device's seconds; waits until it has ended."""
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
        self._passing = 0.0  # seconds that these waited for a sync, which ends, or evaluated
        self.longest_seconds: float | None = None  # of recent steps, waiting for data included

    def next(self, wait_seconds: float, *, is_arriving: bool = False) -> StepTime:
        """Return the time of the step that has just ended, given the loader's total wait.

        Waiting while the dataset `is_arriving` is not the pace of the steps that follow.
        """
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        share = min(1.0, (wait_seconds - self._waited) / seconds)
        self._since, self._waited, self._last_seconds = now, wait_seconds, seconds
        if self._first_ended is None:
            self._first_ended = now
        else:
            self._num_steps += 1
            self._passing += seconds * share * is_arriving
        return StepTime(seconds, share)

    def seconds_for(self, num_steps: int) -> float | None:
        """Estimate the time of `num_steps` more steps, with commits as so far."""
        if self._first_ended is None or not self._num_steps:
            return None
        trained = time.monotonic() - self._first_ended - self._passing
        return trained / self._num_steps * num_steps

    def pass_over(self, seconds: float) -> None:
        """Leave out an evaluation, which is not part of the steps' pace."""
        self._passing += seconds if self._first_ended is not None else 0.0

    def remember(self) -> None:
        """Count the step that has just ended as typical; slow ones are forgotten slowly."""
        self.longest_seconds = max(self._last_seconds, 0.99 * (self.longest_seconds or 0.0))

    def skip(self) -> None:
        """Leave out what happened since: an evaluation or a commit is not a step."""
        self._since = time.monotonic()


def evaluations_ahead(step: int, num_steps: int, *, every: int, last: int, is_due: bool) -> int:
    """Count the evaluations of the next `num_steps` of a stage, whose last step has one.

    There is one each `every` steps (0: none), and first that of `step` itself if that is due.
    """
    end = step + num_steps
    among = end // every - step // every if every else 0
    return is_due + among + (step < end == last and (every == 0 or end % every != 0))


class TimesSoFar:
    """Adds up where the time of a stage's steps went, starting from earlier attempts' times."""

    def __init__(self, before: Mapping[str, float], num_workers: int) -> None:
        self._times = _StageTimes(**before)
        self._num_workers = num_workers
        self._is_first = True

    def add(
        self, num_samples: int, time: StepTime, computed: float, made: Mapping[str, float]
    ) -> None:
        """Add a step: its samples, what the device took, and the loader's seconds by part."""
        times, waited = self._times, time.seconds * time.waited_share
        if self._is_first:
            self._is_first = False
            times.first_waited_seconds += waited
            return
        times.samples += num_samples
        times.seconds += time.seconds
        times.waited_seconds += waited
        times.computed_seconds += min(computed, time.seconds)
        times.loader_seconds += self._num_workers * time.seconds
        for part, seconds in made.items():
            name = f"{part}_seconds"
            setattr(times, name, getattr(times, name) + seconds)

    def add_evaluation(self, seconds: float) -> None:
        """Add an evaluation of the stage."""
        self._times.evaluations += 1
        self._times.evaluated_seconds += seconds

    def seconds_for(
        self, num_steps: int, pace: Pace, *, evaluations: int, every: int, planned: float
    ) -> float | None:
        """Estimate the time of `num_steps` more steps and of the evaluations among them.

        Most attempts on Spot end before they have evaluated: earlier ones say how long it takes,
        or the plan, whose evaluations, one each `every` steps, take `planned` seconds for each
        second of steps. None for steps without a pace.
        """
        step, times = pace.seconds_for(1), self._times
        if step is None and num_steps:
            return None
        each = planned * every * (step or 0.0)
        if times.evaluations:
            each = times.evaluated_seconds / times.evaluations
        return num_steps * (step or 0.0) + evaluations * each

    def to_json(self) -> dict[str, float]:
        """Return the times for a checkpoint's position, from which the next attempt goes on."""
        return self._times.to_json()


class StepLog:
    """Records the steps of one stage, each once its numbers are on the host."""

    def __init__(
        self, context: AttemptContext, stage: Train, plan: BatchPlan, first_step: int
    ) -> None:
        self._context = context
        self._stage = stage
        self._plan = plan
        self._is_first = True
        self._digests: dict[int, dict[str, int | str]] = {}  # of the steps that come
        self.bar = ProgressBar(stage.name, plan.num_steps, first_step)

    def record(
        self, position: Position, result: StepResult, time: StepTime, counts: Mapping[str, int]
    ) -> None:
        """Record the step that ended at `position`; DivergedError if loss or norm is not finite.

        `counts` is what its samples counted while they were made.
        """
        loss, norm, metrics = result.read()
        # Where the loss scaler skipped the step, an infinite norm is the reason it scales down.
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
        if self._is_first:  # tells how long the machine took to get here
            numbers["time"], self._is_first = datetime.now(UTC).isoformat(), False
        self._context.metrics.write(
            "step",
            stage=self._stage.name,
            step=position.step,
            stage_step=position.stage_step,
            epoch=self._plan.epoch(step),
            samples_per_second=round(len(ids) / time.seconds, 2),
            data_wait=round(time.waited_share, 4),
            **self._digest(step),
            **numbers,
        )

    def _digest(self, step: int) -> dict[str, int | str]:
        """Digest a step's ids, and with them those of the next: in a row each takes a fifth."""
        if step not in self._digests:
            plan, end = self._plan, (self._plan.epoch(step) + 1) * self._plan.steps_per_epoch
            ahead = range(step, min(step + _DIGESTS_AHEAD, end))
            self._digests = {n: _sample_digest(plan.ids(n), plan.num_samples) for n in ahead}
        return self._digests.pop(step)

    def _show(self, position: Position, time: StepTime, loss: float, learning_rate: float) -> None:
        step = position.stage_step - 1
        epoch, rate = self._plan.epoch(step) + 1, len(self._plan.ids(step)) / time.seconds
        text = (
            f"epoch {epoch}/{self._plan.num_epochs} loss {loss:.4f} lr {learning_rate:.2e} "
            f"{readable(rate)} samples/s, {time.waited_share:.0%} waiting for data"
        )
        self.bar.show(position.stage_step, f"{text}{self._context.meter_text()}")


def _sample_digest(ids: Any, split_samples: int) -> dict[str, int | str]:
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
