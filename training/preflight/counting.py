"""Observers of a step on fake tensors: live storages, kernels, bytes moved, tensors kept.

Every storage is counted from its allocation until it is freed, in the allocator's blocks of 512
bytes.
"""

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALLOCATION_BYTES = 512
_WITHOUT_KERNEL = frozenset(
    [
        *("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "squeeze", "t"),
        *("transpose", "unsqueeze", "view", "_unsafe_view", "empty", "new_empty_strided"),
    ]
)


class Convolutions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of convolutions, forward and backward: all, grouped, and channels last.

    Depthwise ones do not count as grouped: they have kernels of their own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.grouped_flops, self.channels_last_flops = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            # input, weight, bias, stride, padding, dilation, transposed, output padding, groups
            self._add(out, args[0], args[1], args[6], args[8], passes=1)
        elif func is torch.ops.aten.convolution_backward.default:
            # gradient, input, weight, ..., transposed, output padding, groups, output mask
            self._add(args[0], args[1], args[2], args[7], args[9], passes=sum(args[10][:2]))
        return out

    def shares(self, total_flops: int) -> dict[str, float]:
        """Return the shares of a step's FLOPs, as a footprint has them."""
        # torch miscounts the backward of grouped convolutions, so the total may be too small.
        total = max(total_flops, self.flops, 1)
        return {
            "convolution_share": round(self.flops / total, 3),
            "grouped_share": round(self.grouped_flops / total, 3),
            "channels_last_share": round(self.channels_last_flops / max(self.flops, 1), 3),
        }

    def _add(
        self, out: Tensor, given: Tensor, weight: Tensor, transposed: bool, groups: int, passes: int
    ) -> None:
        pixels = given if transposed else out
        flops = 2 * pixels.numel() * math.prod(weight.shape[1:]) * passes
        self.flops += flops
        self.grouped_flops += flops if groups > 1 and weight.shape[1] > 1 else 0
        last = torch.channels_last if given.ndim == 4 else torch.channels_last_3d
        if given.ndim in (4, 5) and given.is_contiguous(memory_format=last):
            self.channels_last_flops += flops


def _starts_kernel(operation: Any) -> bool:
    """Whether an operation starts a kernel: views and plain allocations do not."""
    name = operation.overloadpacket.__name__
    # transformers: the product of all experts; training: growth's fused optimizer.
    return (
        operation.namespace in ("aten", "transformers", "training") and name not in _WITHOUT_KERNEL
    )


# Limits of torch's multi_tensor_apply: blocks per launch, elements per block, and tensors per
# launch by the number of lists.
_BLOCKS, _BLOCK_ELEMENTS, _TENSORS = 320, 65_536, (110, 64, 48, 36, 30)
_OVERWRITE = frozenset(["copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_"])
_PICK = frozenset(["embedding", "gather", "index", "index_select"])


@dataclass(slots=True)
class _Work:
    """The work of a device: kernels, and the bytes that they read and write."""

    kernels: int = 0
    moved_bytes: int = 0

    def add(self, operation: Any, given: Sequence[Any], named: Mapping[str, Any], out: Any) -> None:
        """Add an operation, unless it starts no kernel."""
        if not _starts_kernel(operation):
            return
        name, read_bytes = operation.overloadpacket.__name__, 0
        written = {id(t): t for t in tree_leaves(out) if isinstance(t, Tensor)}
        arguments = operation._schema.arguments
        values = {a.name: value for a, value in zip(arguments, given, strict=False)} | {**named}
        for argument in arguments:
            tensors = [t for t in tree_leaves(values.get(argument.name)) if isinstance(t, Tensor)]
            # Fused optimizers may change gradients, to unscale them.
            changes = argument.is_write and argument.name != "grads"
            if changes:
                written.update((id(tensor), tensor) for tensor in tensors)
            if not (changes and (argument.is_out or name in _OVERWRITE)):
                read_bytes += sum(tensor.nbytes for tensor in tensors)
        written_bytes = sum(tensor.nbytes for tensor in written.values())
        self.moved_bytes += written_bytes
        self.moved_bytes += min(read_bytes, 2 * written_bytes) if name in _PICK else read_bytes
        self.kernels += _num_launches(name, given)


def _num_launches(name: str, given: Sequence[Any]) -> int:
    """Return 1, or the number of launches that torch makes for lists of tensors."""
    lists: list[list[Tensor]] = [value for value in given if isinstance(value, list) and value]
    if not lists or not name.startswith(("_foreach", "_fused")):
        return 1
    blocks = sum(math.ceil(tensor.numel() / _BLOCK_ELEMENTS) for tensor in lists[0])
    most = _TENSORS[min(len(lists), len(_TENSORS)) - 1]
    return max(math.ceil(len(lists[0]) / most), math.ceil(blocks / _BLOCKS))


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the live storages, remembers those alive at the peak, and adds up the work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "start"
        # A freed storage's address is reused, its number never is.
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, int] = {}
        self._next_number = itertools.count()
        self._bytes = 0
        self.begin()

    def begin(self) -> None:
        """Reset peak and work; live storages stay counted."""
        self.work, self.optimizer_work = _Work(), _Work()
        self.peak_bytes = 0
        self.backward_peak_bytes = 0  # the most outside of the optimizer
        self.peak_phase = self.phase
        self._at_peak: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        work = self.optimizer_work if self.phase == "optimizer" else self.work
        work.add(func, args, kwargs or {}, result)
        self.count(tree_leaves(result))
        return result

    def count(self, values: Iterable[Any]) -> None:
        """Count the storages of new values; views of known storages change nothing."""
        for value in values:
            if not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            if id(storage) in self._numbers:
                continue
            number = self._numbers[id(storage)] = next(self._next_number)
            blocks = math.ceil(storage.nbytes() / _ALLOCATION_BYTES)
            self._alive[number] = blocks * _ALLOCATION_BYTES
            self._bytes += self._alive[number]
            weakref.finalize(storage, self._end, id(storage)).atexit = False
        if self.phase != "optimizer":
            self.backward_peak_bytes = max(self.backward_peak_bytes, self._bytes)
        if self._bytes > self.peak_bytes:
            self.peak_bytes, self.peak_phase = self._bytes, self.phase
            self._at_peak = dict(self._alive)

    def share_of_peak(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of these tensors' storages that were alive at the peak."""
        numbers = {self._numbers[id(tensor.untyped_storage())] for tensor in tensors}
        return sum(self._at_peak.get(number, 0) for number in numbers)

    def _end(self, address: int) -> None:
        self._bytes -= self._alive.pop(self._numbers.pop(address))


class KeptForBackward:
    """Bytes that autograd keeps for backward, each storage once, without parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self._storages: dict[int, Any] = {}

    @contextmanager
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
