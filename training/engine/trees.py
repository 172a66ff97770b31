"""Batches as trees of tensors: moved to a device, compared by shape."""

from collections.abc import Callable, Hashable, Iterable, Mapping

import torch
from torch import Tensor

from training.workload import Batch, Train

# Far more than torch compiles code for (256 variants of a function), and kilobytes.
_MOST_KEYS = 1024


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a pytree to the device; no-op on the CPU."""
    if device.type == "cpu":
        return batch
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(batch: Batch) -> Batch:
    """Copy every tensor of a pytree on the CPU to page-locked memory."""
    return _mapped(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())


def _mapped(batch: Batch, act: Callable[[Tensor], Tensor]) -> Batch:
    if isinstance(batch, Tensor):
        return act(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(value, act) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, act) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(value, act) for value in batch)
    return batch


class CompiledShapes:
    """The shapes of batches that a stage was trained on in this process: their code is there.

    Without compilation all shapes are one, and only the first step differs from the others.
    """

    def __init__(self, stage: Train) -> None:
        self._stage = stage
        self._keys: dict[Hashable, None] = {}  # those used last come last

    def have(self, batches: Iterable[Batch]) -> bool:
        """Whether a step on these batches compiles nothing."""
        return all(self._key(batch) in self._keys for batch in batches)

    def add(self, batches: Iterable[Batch]) -> None:
        """Remember the batches of a step."""
        for key in map(self._key, batches):
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > _MOST_KEYS:
            self._keys.pop(next(iter(self._keys)))

    def _key(self, batch: Batch) -> Hashable:
        if self._stage.settings.compile_mode is None:
            return None
        return self._stage.shape_key(batch)
