"""How long steps take, the share of it spent waiting for data, and how long the device works."""

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from training.report.bottleneck import StageTimes


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
