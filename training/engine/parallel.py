"""One stage's model on several ranks: a copy on each, or a share on each (FSDP2).

A loss or an evaluation uses the model only inside one module's forward, so the parameters it sees
are complete, wherever they are stored. Copies sum their gradients, while backward still runs, and
BatchNorm's statistics.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from contract.errors import UserError
from training.durable import RunFailedError, World
from training.engine.optimizer import names_by_id
from training.engine.reduction import BucketLayout, Reduction, Turn, add, buckets, turns
from training.engine.stage_checks import checked_loss
from training.workload import Batch, Settings, Train


class _Gradients:
    """The gradients of a rank's whole model, on their way to all other ranks.

    Buckets are sent in one order, each as soon as backward has computed its gradients and those of
    the buckets before it. A parameter without a gradient on one rank adds nothing there.
    """

    def __init__(self, stage: Train, parameters: Sequence[Tensor], world: World) -> None:
        self._stage = stage
        self._world = world
        self._parameters = parameters
        self._buckets = buckets(parameters)
        self._layouts = [BucketLayout([parameters[n] for n in bucket]) for bucket in self._buckets]
        self.reduction = Reduction(world, is_ring=stage.settings.reduction == "ring")
        self._aside: Sequence[Sequence[Tensor | None]] | None = None  # while backward may send
        self._waited_for: list[set[int]] = []  # by bucket: parameters without a gradient so far
        self._num_sent = 0
        self._has_own = [False] * len(parameters)
        self._before: list[tuple[int, int]] = []  # a step's forwards
        # Weak: a parameter that held this would hold the whole stage after its end.
        ready = weakref.WeakMethod(self._ready)
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, number=number: (act := ready()) and act(number)
            )
        self._bucket_of = {n: k for k, bucket in enumerate(self._buckets) for n in bucket}

    def begin_step(self, model: nn.Module) -> None:
        """Start a step, of which nothing has been sent."""
        self._num_sent = 0
        self._before = _versions(model)

    @contextlib.contextmanager
    def sending(self, aside: Sequence[Sequence[Tensor | None]]) -> Iterator[None]:
        """Send buckets in this context, the last backward, after adding the sums set aside."""
        self._waited_for = [set(bucket) for bucket in self._buckets]
        self._aside = aside
        try:
            yield
        finally:
            self._aside = None

    def send_rest(self, aside: Sequence[Sequence[Tensor | None]]) -> None:
        """Send what backward has not: a rank may have run none, or left out parameters."""
        while self._num_sent < len(self._buckets):
            self._send(aside)

    def end_step(self, model: nn.Module) -> None:
        """Leave the sums in `grad`, and None where no rank has a gradient."""
        has_any = self._world.any_of(self._has_own)
        self.reduction.end()
        for parameter, is_there in zip(self._parameters, has_any, strict=True):
            if not is_there:
                parameter.grad = None
        others = set(model.parameters()) - set(self._parameters)
        if any(parameter.grad is not None for parameter in others):
            raise RunFailedError(
                f"stage {self._stage.name!r}: a parameter that model() froze was unfrozen, but "
                "ranks do not sum its gradients; leave it trainable in model(), and freeze it in "
                "loss for as long as you want"
            )
        if _versions(model) != self._before:
            raise RunFailedError(
                f"stage {self._stage.name!r}: its forward changes a parameter, or a buffer other "
                "than BatchNorm's statistics, which ranks cannot sum; change parameters in the "
                "optimizer's step, or train with --num-processes 1"
            )

    def _ready(self, number: int) -> None:
        """Note a gradient after each backward, and send the buckets that are complete."""
        if self._aside is None:
            return
        if self._bucket_of[number] < self._num_sent:
            raise RunFailedError(
                f"stage {self._stage.name!r}: one backward computed a gradient twice, after ranks "
                "had begun to sum it; pass use_reentrant=False to torch.utils.checkpoint"
            )
        self._waited_for[self._bucket_of[number]].discard(number)
        while self._num_sent < len(self._buckets) and not self._waited_for[self._num_sent]:
            self._send(self._aside)

    def _send(self, aside: Sequence[Sequence[Tensor | None]]) -> None:
        bucket = self._buckets[self._num_sent]
        parameters = [self._parameters[number] for number in bucket]
        sums = [parameter.grad for parameter in parameters]
        for earlier in reversed(aside):
            sums = add([earlier[number] for number in bucket], sums)
        for number, parameter, own in zip(bucket, parameters, sums, strict=True):
            self._has_own[number] = own is not None
            if own is not None and own.layout != torch.strided:
                raise RunFailedError(
                    f"stage {self._stage.name!r}: a gradient of shape {tuple(parameter.shape)} is "
                    "sparse, which ranks cannot sum; pass sparse=False to nn.Embedding"
                )
        summed = self.reduction.begin(self._layouts[self._num_sent], sums)
        for parameter, gradient in zip(parameters, summed, strict=True):
            parameter.grad = gradient
        self._num_sent += 1


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return what changes with a parameter or a buffer, except BatchNorm's, if one is changed."""
    norms = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers(False)}
    state = (*model.buffers(), *model.parameters())
    return [(id(t), t._version) for t in state if id(t) not in norms]


class _NormStatistics:
    """The running statistics of a model's BatchNorm, as sums over the micro-batches of a step."""

    def __init__(self, model: nn.Module) -> None:
        norms = (module for module in model.modules() if isinstance(module, _NormBase))
        self._norms = [norm for norm in norms if norm.running_mean is not None]
        self._aside: list[list[Tensor | None]] = []
        self.begin(is_alone=True)

    def begin(self, *, is_alone: bool) -> None:
        """Prepare a step; where its only micro-batch `is_alone`, BatchNorm's own update stands."""
        self._used = [] if is_alone else [norm for norm in self._norms if norm.training]
        named = [dict(norm.named_buffers(recurse=False)) for norm in self._used]
        self._tensors = [own[name] for own in named for name in ("running_mean", "running_var")]
        counts = [own["num_batches_tracked"] for own in named if "num_batches_tracked" in own]
        self._all = [*self._tensors, *counts]
        self._before = [tensor.clone() for tensor in self._all]
        self._sums: list[Tensor | None] = [None] * len(self._tensors)

    def set_aside(self) -> None:
        """Set the sum so far aside and begin a new one."""
        self._aside.append(self._sums)
        self._sums = [None] * len(self._tensors)

    def add(self, joins: int) -> None:
        """After a micro-batch, add the statistics it left to the sum, and restore those before."""
        if not self._tensors:
            self._aside.clear()
            return
        self._sums = add(self._sums, [tensor.clone() for tensor in self._tensors])
        torch._foreach_copy_(self._all, self._before)
        for _ in range(joins):
            self._sums = add(self._aside.pop(), self._sums)

    def begin_reduction(self, reduction: Reduction) -> None:
        """Begin to sum over the ranks, bucket by bucket."""
        for bucket in buckets(self._tensors):
            layout = BucketLayout([self._tensors[number] for number in bucket])
            parts = reduction.begin(layout, [self._sums[number] for number in bucket])
            for number, part in zip(bucket, parts, strict=True):
                self._sums[number] = part

    def end(self, num_micro_batches: int) -> None:
        """Set the statistics to the mean over all micro-batches of the step."""
        sums = [tensor for tensor in self._sums if tensor is not None]
        if sums:
            torch._foreach_div_(sums, float(num_micro_batches))
            for place, norm in enumerate(self._used):
                if not norm.training:  # frozen in loss: a mean of equals may be rounded
                    own = slice(2 * place, 2 * place + 2)
                    sums[own] = self._before[own]
                elif norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.add_(1)
            torch._foreach_copy_(self._tensors, sums)


_T = TypeVar("_T")


def is_sharded(settings: Settings, world_size: int) -> bool:
    """Whether each rank keeps a share of the model; a single process keeps all of it."""
    return settings.sharding == "full" and world_size > 1


def parallel(stage: Train, model: nn.Module, world: World) -> "Parallel":
    """Distribute the model, which may still be on the CPU, over all ranks' devices."""
    if is_sharded(stage.settings, world.size):
        return _Sharded(stage, model, world)
    return _Whole(stage, model.to(world.device), world)


class _Work(nn.Module):
    """Any work with a model, such as its loss, as a module's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, act: Callable[[nn.Module], Any]) -> Any:
        return act(self.model)


def _losses(stage: Train, batch: Batch, step: int, num_steps: int, model: nn.Module) -> Any:
    """Return the stage's loss as a tuple, in which FSDP finds the tensors."""
    loss = checked_loss(stage, stage.loss(model, batch, step, num_steps))
    return loss.total, loss.mean, loss.metrics


class Parallel:
    """A stage's model as the ranks train it together; here one process has all of it."""

    def __init__(self, stage: Train, model: nn.Module) -> None:
        self._stage = stage
        self._model = model
        self._work: nn.Module = _Work(model)

    def losses(
        self, batch: Batch, step: int, num_steps: int
    ) -> tuple[Tensor, Tensor | None, Mapping[str, tuple[Tensor | float, float]]]:
        """Compute the stage's loss of one micro-batch: total, mean, metrics."""
        act = partial(_losses, self._stage, batch, step, num_steps)
        return self._work(act)  # type: ignore[no-any-return]

    def use(self, act: Callable[[nn.Module], _T]) -> _T:
        """Act with the whole model, without gradients; if it is sharded, on all ranks alike."""
        return act(self._model)

    def begin_step(self, num_micro_batches: int) -> None:
        """Prepare a step before its first micro-batch; the number counts those of all ranks."""

    def adding(self, place: int) -> AbstractContextManager[None]:
        """Context for forward and backward of this rank's micro-batch at `place` of the step."""
        return contextlib.nullcontext()

    def end_step(self) -> None:
        """Finish a step after its last micro-batch: all ranks have its complete gradients."""

    def end_evaluation(self) -> None:
        """Free what an evaluation gathered, so that parameters may be changed or swapped."""


class _Whole(Parallel):
    """Every rank has the whole model, and its gradients are summed in the order of reduction.py.

    So are BatchNorm's running statistics: each micro-batch starts from those at the step's
    beginning, and the step leaves the mean of the results.
    """

    def __init__(self, stage: Train, model: nn.Module, world: World) -> None:
        super().__init__(stage, model)
        if world.size > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
            raise UserError(
                f"stage {stage.name!r}: SyncBatchNorm would hang ranks with unequal micro-batches; "
                "leave out convert_sync_batchnorm: ranks sum BatchNorm's statistics without it"
            )
        self._world = world
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._aside: list[list[Tensor | None]] = []
        self._statistics = _NormStatistics(model)
        self._num_micro_batches = 0
        self._turns: Sequence[Turn] = ()
        self._ranks = _Gradients(stage, self._parameters, world) if world.size > 1 else None

    def begin_step(self, num_micro_batches: int) -> None:
        self._num_micro_batches = num_micro_batches
        self._turns = turns(num_micro_batches, self._world.rank, self._world.size)
        self._statistics.begin(is_alone=num_micro_batches == 1 and self._world.size == 1)
        if self._ranks is not None:
            self._ranks.begin_step(self._model)

    @contextlib.contextmanager
    def adding(self, place: int) -> Iterator[None]:
        turn = self._turns[place]
        if turn.sets_aside:
            self._aside.append([p.grad for p in self._parameters])
            for parameter in self._parameters:
                parameter.grad = None
            self._statistics.set_aside()
        if self._ranks is not None and place == len(self._turns) - 1:
            # The sums still set aside are added, and sent, while backward runs.
            with self._ranks.sending(self._aside):
                yield
        else:
            yield
            for _ in range(turn.joins):
                gradients = add(self._aside.pop(), [p.grad for p in self._parameters])
                for parameter, gradient in zip(self._parameters, gradients, strict=True):
                    parameter.grad = gradient
        self._statistics.add(turn.joins)

    def end_step(self) -> None:
        if self._ranks is not None:
            self._ranks.send_rest(self._aside)
            self._aside.clear()
            self._statistics.begin_reduction(self._ranks.reduction)
            self._ranks.end_step(self._model)
        self._statistics.end(self._num_micro_batches)


class _Sharded(Parallel):
    """Every rank has a share of each parameter and of its optimizer state.

    A block's parameters are gathered for its forward and backward and freed afterwards; gradients
    are reduced with every micro-batch, each rank keeping its share: full gradients are never kept.
    """

    def __init__(self, stage: Train, model: nn.Module, world: World) -> None:
        # Half a second of imports that only sharded stages need.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super().__init__(stage, model)
        self._world = world
        blocks = named_blocks(stage, model)
        mesh = init_device_mesh(world.device.type, (world.size,))
        before = sorted(names_by_id(model).values())
        try:
            for block in (*blocks, self._work):
                fully_shard(block, mesh=mesh)
        except (ValueError, NotImplementedError) as error:
            raise UserError(
                f"stage {stage.name!r}: its model cannot be sharded: {error}; "
                "set sharding='none', or change the model"
            ) from error
        if sorted(names_by_id(model).values()) != before:
            raise UserError(
                f"stage {stage.name!r}: sharding would split a parameter that several modules "
                "share; let `sharded_modules` name none of them, or one module with all of them"
            )
        self._gathered = [m for m in self._work.modules() if isinstance(m, FSDPModule)]

    def use(self, act: Callable[[nn.Module], _T]) -> _T:
        result: _T = self._work(act)
        return result

    def begin_step(self, num_micro_batches: int) -> None:
        self._world.share_buffers(self._model)

    def end_evaluation(self) -> None:
        for module in self._gathered:
            module.reshard()


def named_blocks(stage: Train, model: nn.Module) -> list[nn.Module]:
    """The blocks that the stage names, nested ones first."""
    named = list(stage.sharded_modules(model))
    order = {id(module): number for number, module in enumerate(model.modules())}
    if unknown := [type(module).__name__ for module in named if id(module) not in order]:
        raise UserError(
            f"stage {stage.name!r}: `sharded_modules` returned a {unknown[0]} that is not part of "
            "its model; return modules of the model that it is called with"
        )
    unique = {id(module): module for module in named}
    return sorted(unique.values(), key=lambda module: -order[id(module)])


def broadcast_from_rank_0(model: nn.Module, world: World) -> None:
    """Copy rank 0's parameters and buffers to every rank, one by one, on the CPU."""
    with torch.no_grad():
        state = model.state_dict().items()
        for name, tensor in ((name, one) for name, one in state if isinstance(one, Tensor)):
            mine = {name: tensor.contiguous()} if world.leads else None
            tensor.copy_(world.share_tensors(mine)[name])
