"""What one step of a stage needs, measured without having it: the step runs on fake tensors.

Not counted: the CUDA context, fragmentation, cuDNN's workspaces. Autocast follows the CPU's
lists, and attention with dropout uses the plain formula; sizing's margin covers the difference.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from contract.errors import UserError
from training.engine.optimizer import autocast, step_in_backward
from training.engine.reduction import sums_set_aside
from training.preflight.counting import Convolutions, KeptForBackward, LiveMemory
from training.preflight.standalone import LAST_STEP, refusing_reads, standalone_inputs
from training.workload import Batch, Loss, Probe, Train, implements

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
    with _explained(stage), FakeTensorMode() as fake:
        memory = LiveMemory()
        with memory:
            batch = _fake(example, fake, memory)
            model = stage.model(standalone_inputs(stage.name, config)).train()
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
        checkpoint_bytes=_bytes(model.state_dict().values()) + _bytes(state),
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

    with _explained(stage), FakeTensorMode() as fake, torch.no_grad():
        build = partial(stage.model, standalone_inputs(stage.name, config))
        return _forward(fake, build, forward, example)[0].peak_bytes


def measure_probe(name: str, probe: Probe) -> dict[str, Any]:
    """Measure a Prepare stage's work on one batch; return its part of a `_StepFootprint`."""

    def forward(model: nn.Module, batch: Batch) -> Any:
        return model(batch)

    refusing = refusing_reads(
        name, "its probe reads data", "let shapes alone decide what it computes"
    )
    with refusing, FakeTensorMode() as fake, torch.no_grad():
        memory, model, batch = _forward(fake, probe.build, forward, probe.batch)
        flops, shares = _flops(lambda: forward(model, batch))
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


class _Step:
    """One optimizer step as training/engine/learner.py makes it."""

    def __init__(
        self,
        stage: Train,
        model: nn.Module,
        optimizer: Optimizer,
        batch: Batch,
        weight: float,
        memory: LiveMemory,
    ) -> None:
        self.output_bytes = 0
        self._stage = stage
        self._model = model
        self._optimizer = optimizer
        self._batch = batch
        self._weight = weight
        self._memory = memory
        model.register_forward_hook(self._see_output)
        for group in optimizer.param_groups:
            # What torch chooses for tensors on a GPU.
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        if stage.settings.optimizer_in_backward:
            step_in_backward(optimizer)

    def run(self, num_micro: int, size: int) -> None:
        """Compute gradients of `num_micro` equal micro-batches of `size`, then run the optimizer.

        While the last of them is computed, sums of the step's earlier ones wait to be added.
        """
        self._optimizer.zero_grad(set_to_none=True)
        aside: list[Tensor] = []
        for number in range(num_micro):
            if number == num_micro - 1:
                num_of_step = math.ceil(self._stage.settings.global_batch / size)
                aside = sums_set_aside(self._model, num_of_step)
            self.forward_backward()
        aside.clear()
        self._memory.phase = "optimizer"
        if self._stage.settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(
                self._model.parameters(), self._stage.settings.clip_norm, foreach=True
            )
        if not self._stage.settings.optimizer_in_backward:
            what = f"its optimizer {type(self._optimizer).__name__} reads data"
            with refusing_reads(self._stage.name, what, "measure it with another optimizer"):
                self._optimizer.step()

    def forward_backward(self) -> None:
        self._memory.phase = "forward"
        with autocast(self._stage.settings.precision, _CPU):
            loss = _loss(self._stage, self._model, self._batch)
            scaled = loss.total / self._weight
            if loss.mean is not None:
                scaled = scaled + loss.mean
        self._memory.phase = "backward"
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
    fake: FakeTensorMode,
    build: Callable[[], nn.Module],
    forward: Callable[[nn.Module, Batch], Any],
    example: Batch,
) -> tuple[LiveMemory, nn.Module, Batch]:
    """Measure a forward pass without gradients; return its model and batch as well."""
    memory = LiveMemory()
    with memory:
        batch = _fake(example, fake, memory)
        model = build().eval()
        memory.begin()
        forward(model, batch)
    return memory, model, batch


def _fake(example: Batch, fake: FakeTensorMode, memory: LiveMemory) -> Batch:
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
