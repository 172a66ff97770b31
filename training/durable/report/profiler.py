"""`--profile N`: a torch.profiler trace of N steps after a warm-up, kept in the run.

Open it in https://ui.perfetto.dev. Tracing does not change a run's numbers, but slows down the
traced steps.
"""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from training.durable.store.protocol import Store

_log = logging.getLogger(__name__)

_WARM_UP_STEPS = 3
_PROFILES = "profiles/"


class StepProfiler:
    """Traces the steps of an attempt from _WARM_UP_STEPS on; call `step` after each."""

    def __init__(self, num_steps: int, store: Store, generation: int, scratch: Path) -> None:
        self._num_steps = num_steps
        self._store = store
        self._key = f"{_PROFILES}{generation:04d}-trace.json.gz"
        self._path = scratch / "trace.json.gz"
        self._done = 0
        self._profile: profile | None = None

    def step(self) -> None:
        """Count a step that has ended."""
        self._done += 1
        if self._done == _WARM_UP_STEPS:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            # Before 2.13 torch warns in every trace, even one of a single cycle, that events are
            # cleared between cycles, unless asked to keep them.
            self._profile = profile(
                activities=activities, record_shapes=True, profile_memory=True, acc_events=True
            )
            self._profile.start()
        elif self._profile is not None and self._done == _WARM_UP_STEPS + self._num_steps:
            self.close()

    def close(self) -> None:
        """Store the trace, even if the attempt ends before the last step to trace."""
        if self._profile is None:
            return
        traced, self._profile = self._profile, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        traced.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self._path))
        self._store.put_file(self._key, self._path)
        self._path.unlink()
        steps = min(self._done - _WARM_UP_STEPS, self._num_steps)
        _log.info(f"[profile] {steps} steps: {self._store.uri}/{self._key}")
