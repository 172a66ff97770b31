"""The memory and arithmetic of one step of a stage, counted while it runs on fake tensors.

Every storage counts from its allocation until it is freed, in the allocator's blocks of 512 bytes.
Not counted: the CUDA context, fragmentation, cuDNN's workspaces. Autocast follows the CPU's
lists, and attention with dropout uses the plain formula; sizing's margin covers the difference.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from contract.errors import UserError
from training.engine.optimizer import autocast, step_in_backward
from training.engine.reduction import sums_set_aside
from training.preflight.standalone import LAST_STEP, Fakes, built, refusing_reads, standalone_inputs
from training.workload import Batch, Loss, Probe, Train, implements

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


_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepFootprint:
    """Bytes and FLOPs of one optimizer step in steady state (the optimizer's state exists)."""

    parameters: int
    trainable_parameters: int
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int  # parameters held whole at once where ranks share the model
    peak_bytes: int
    backward_peak_bytes: int  # the most outside of the optimizer
    peak_phase: str  # forward, backward or optimizer
    peak_gradient_bytes: int  # gradients at the peak
    peak_activation_bytes: int  # the peak without parameters, buffers, gradients and state
    kept_bytes: int  # saved or recomputed for a micro-batch's backward
    output_bytes: int  # what forward returns for a micro-batch, such as logits
    checkpoint_bytes: int
    kernels: int  # started by one micro-batch's forward and backward
    moved_bytes: int  # that these read and write
    optimizer_kernels: int  # started by clipping and the optimizer
    optimizer_moved_bytes: int
    flops_per_sample: int  # forward and backward; matrix products, convolutions and attention
    convolution_share: float  # of the FLOPs
    grouped_share: float  # of the FLOPs: convolutions in groups, not depthwise
    channels_last_share: float  # of the convolutions' FLOPs


def measure_step(
    stage: Train, config: Any, size: int, batch: Batch | None = None
) -> _StepFootprint:
    """Measure an optimizer step with micro-batches of `size` samples: the largest, or `batch`."""
    example, weight = _example(stage, size) if batch is None else (batch, stage.weight(batch))
    with _explained(stage), Fakes() as fake:
        memory = LiveMemory()
        with memory:
            batch = _fake(example, fake, memory)
            model = built(partial(stage.model, standalone_inputs(stage.name, config))).train()
            optimizer = stage.optimizer(model)
            step = _Step(stage, model, optimizer, batch, weight, memory)
            # With accumulation the gradients stay while the next micro-batch is computed.
            num_micro = 2 if stage.settings.global_batch > size else 1
            step.run(1, size)  # creates the optimizer's state
            memory.begin()
            step.run(num_micro, size)
            work, optimizer_work = memory.work, memory.optimizer_work
        flops, shares, kept_bytes = _flops_and_kept_bytes(model, step.forward_backward)
    parameters, buffers = list(model.parameters()), list(model.buffers())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [t for t in tree_leaves(optimizer.state_dict()) if isinstance(t, Tensor)]
    saved = [t for t in model.state_dict().values() if isinstance(t, Tensor)]
    known = memory.share_of_peak([*parameters, *buffers, *gradients, *state])
    return _StepFootprint(
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=_bytes(parameters),
        buffer_bytes=_bytes(buffers),
        gradient_bytes=_bytes(gradients),
        optimizer_bytes=_bytes(state),
        gathered_bytes=_gathered_bytes(stage, model),
        peak_bytes=memory.peak_bytes,
        backward_peak_bytes=memory.backward_peak_bytes,
        peak_phase=memory.peak_phase,
        peak_gradient_bytes=memory.share_of_peak(gradients),
        peak_activation_bytes=memory.peak_bytes - known,
        kept_bytes=kept_bytes,
        output_bytes=step.output_bytes,
        checkpoint_bytes=_bytes(saved) + _bytes(state),
        kernels=work.kernels // num_micro,
        moved_bytes=work.moved_bytes // num_micro,
        optimizer_kernels=optimizer_work.kernels,
        optimizer_moved_bytes=optimizer_work.moved_bytes,
        flops_per_sample=flops // size,
        **shares,
    )


def measure_evaluation(stage: Train, config: Any, size: int) -> int:
    """Peak bytes of a Train stage's loss in eval mode, without gradients."""
    example, _ = _example(stage, size)

    def forward(model: nn.Module, batch: Batch) -> None:
        with autocast(stage.settings.precision, _CPU):
            _loss(stage, model, batch)

    with _explained(stage), Fakes() as fake, torch.no_grad():
        build = partial(stage.model, standalone_inputs(stage.name, config))
        return _forward(fake, build, forward, example)[0].peak_bytes


def measure_probe(name: str, probe: Probe) -> dict[str, Any]:
    """Measure a Prepare stage's work on one batch; return its part of a `_StepFootprint`."""
    refusing = refusing_reads(
        name, "its probe reads data", "let shapes alone decide what it computes"
    )
    with refusing, Fakes() as fake, torch.no_grad():
        memory, model, batch = _forward(fake, probe.build, lambda m, b: m(b), probe.batch)
        flops, shares = _flops(lambda: model(batch))
    parameters = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": _bytes(parameters),
        "peak_bytes": memory.peak_bytes,
        "kernels": memory.work.kernels,
        "flops_per_sample": flops // probe.size,
        **shares,
    }


def _gathered_bytes(stage: Train, model: nn.Module) -> int:
    """Return the bytes outside the sharded blocks, plus those of one block and the next."""
    blocks = [_bytes(block.parameters()) for block in stage.sharded_modules(model)]
    return _bytes(model.parameters()) - sum(blocks) + 2 * max(blocks, default=0)


def _flops_and_kept_bytes(
    model: nn.Module, act: Callable[[], Any]
) -> tuple[int, dict[str, float], int]:
    """Return a step's FLOPs, their shares, and the bytes that backward reads.

    The bytes are scaled up where part of forward is recomputed.
    """
    kept, num_checkpoints = KeptForBackward(model), 0

    def without_checkpoint(frame: Any) -> AbstractContextManager[None]:
        nonlocal num_checkpoints
        num_checkpoints += 1
        return nullcontext()

    # A checkpointed block keeps nothing that hooks could see: count it without checkpoints.
    plain = patch.object(torch.utils.checkpoint, "_checkpoint_hook", without_checkpoint)
    with plain, kept.watching():
        once, shares = _flops(act)
    if not num_checkpoints:
        return once, shares, kept.bytes
    flops, shares = _flops(act)
    return flops, shares, round(kept.bytes * max(1.0, flops / max(once, 1)))


@dataclass(slots=True)
class _Step:
    """One optimizer step as training/engine/learner.py makes it."""

    stage: Train
    model: nn.Module
    optimizer: Optimizer
    batch: Batch
    weight: float
    memory: LiveMemory
    output_bytes: int = 0

    def __post_init__(self) -> None:
        self.model.register_forward_hook(self._see_output)
        for group in self.optimizer.param_groups:
            # What torch chooses for tensors on a GPU.
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        if self.stage.settings.optimizer_in_backward:
            step_in_backward(self.optimizer)

    def run(self, num_micro: int, size: int) -> None:
        """Compute gradients of `num_micro` equal micro-batches of `size`, then run the optimizer.

        While the last of them is computed, sums of the step's earlier ones wait to be added.
        """
        self.optimizer.zero_grad(set_to_none=True)
        aside: list[Tensor] = []
        for number in range(num_micro):
            if number == num_micro - 1:
                num_of_step = math.ceil(self.stage.settings.global_batch / size)
                aside = sums_set_aside(self.model, num_of_step)
            self.forward_backward()
        aside.clear()
        self.memory.phase = "optimizer"
        if self.stage.settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.stage.settings.clip_norm, foreach=True
            )
        if not self.stage.settings.optimizer_in_backward:
            what = f"its optimizer {type(self.optimizer).__name__} reads data"
            with refusing_reads(self.stage.name, what, "measure it with another optimizer"):
                self.optimizer.step()

    def forward_backward(self) -> None:
        self.memory.phase = "forward"
        with autocast(self.stage.settings.precision, _CPU):
            loss = _loss(self.stage, self.model, self.batch)
            scaled = loss.total / self.weight
            if loss.mean is not None:
                scaled = scaled + loss.mean
        self.memory.phase = "backward"
        scaled.backward()  # type: ignore[no-untyped-call]

    def _see_output(self, model: nn.Module, arguments: Any, output: Any) -> None:
        self.output_bytes = _bytes(t for t in tree_leaves(output) if isinstance(t, Tensor))


def _example(stage: Train, size: int) -> tuple[Batch, float]:
    """A batch of the largest samples, and the weight its loss is divided by."""
    if not implements(stage, Train.example):
        raise UserError(
            f"stage {stage.name!r} cannot be measured: it has no `example(size)`, which makes a "
            "batch of the largest samples without data; add it (training/workload.py)"
        )
    batch = stage.example(size)
    return batch, stage.weight(batch)


def _forward(
    fake: Fakes,
    build: Callable[[], nn.Module],
    forward: Callable[[nn.Module, Batch], Any],
    example: Batch,
) -> tuple[LiveMemory, nn.Module, Batch]:
    """Measure a forward pass without gradients; return its model and batch as well."""
    memory = LiveMemory()
    with memory:
        batch = _fake(example, fake, memory)
        model = built(build).eval()
        memory.begin()
        forward(model, batch)
    return memory, model, batch


def _fake(example: Batch, fake: Fakes, memory: LiveMemory) -> Batch:
    batch = tree_map_only(Tensor, fake.from_tensor, example)
    memory.count(tree_leaves(batch))
    return batch


def _flops(act: Callable[[], Any]) -> tuple[int, dict[str, float]]:
    """Return the FLOPs, and the shares of convolutions in them."""
    # The counter of torch 2.14 does not know the CPU's attention, which fake tensors use.
    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }
    convolutions = Convolutions()
    with FlopCounterMode(display=False, custom_mapping=attention) as counter, convolutions:
        act()
    flops = int(counter.get_total_flops())
    return flops, convolutions.shares(flops)


def _attention_flops(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any
) -> int:
    count = sdpa_backward_flop_count(gradient, query, key, value)  # type: ignore[no-untyped-call]
    return int(count)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors; a storage that several share counts once."""
    storages = {id(s): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def _loss(stage: Train, model: nn.Module, batch: Batch) -> Loss:
    """Return the loss, or the stage's surrogate for one that reads data."""
    if implements(stage, Train.surrogate):
        return stage.surrogate(model, batch)
    return stage.loss(model, batch, *LAST_STEP)


def _explained(stage: Train) -> AbstractContextManager[None]:
    """Refuse a step that cannot be made without data."""
    remedy = "add `surrogate(model, batch)`, a step by shapes alone (training/workload.py)"
    if implements(stage, Train.surrogate):
        remedy = "let shapes alone decide what `surrogate` computes"
    return refusing_reads(stage.name, "its step reads data", remedy)
