"""Counts the bytes that autograd keeps from a forward pass for its backward pass."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Kept:
    """Bytes that autograd keeps for backward, each storage once, without parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self._storages: dict[int, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record what is saved inside the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters:
            self._storages[storage._cdata] = storage
        return tensor

    @property
    def bytes(self) -> int:
        """Total bytes of all kept storages."""
        return sum(storage.nbytes() for storage in self._storages.values())
