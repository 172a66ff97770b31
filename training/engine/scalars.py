"""Scalars copied from the device to the host asynchronously: read a step later, without a wait."""

from collections.abc import Sequence

import torch
from torch import Tensor

from training.attempt.world import World


class Scalars:
    """Sums numbers over the ranks and copies them, both asynchronously."""

    def __init__(
        self, values: Sequence[Tensor | float], device: torch.device, world: World
    ) -> None:
        self._read: list[float] | None = None
        if world.size == 1 and device.type == "cpu":
            # Nothing is asynchronous here, and packing takes 40 microseconds.
            self._read = [v.detach().item() if isinstance(v, Tensor) else v for v in values]
            return
        self._event: torch.cuda.Event | None = None
        # Not torch.stack: most values are plain numbers, which need no work on the device.
        self._sums = torch.tensor(
            [0.0 if isinstance(value, Tensor) else value for value in values],
            dtype=torch.float64,
        ).to(device, non_blocking=True)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                self._sums[index].copy_(value.detach())
        self._work = world.sum_later(self._sums)
        if device.type == "cuda":
            if self._work is not None:
                self._work.wait()  # the device waits, not this thread
            self._host = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self._host.copy_(self._sums, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        """Return the sums in the given order, waiting only for work queued before them."""
        if self._read is not None:
            return self._read
        if self._event is not None:
            self._event.synchronize()
            return list(self._host.tolist())
        if self._work is not None:
            self._work.wait()
        return list(self._sums.tolist())
