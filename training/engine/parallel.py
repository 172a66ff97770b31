"""One stage's model on several ranks: a copy on each (DDP), or a share on each (FSDP2).

A loss or an evaluation uses the model only inside one module's forward, so the parameters it sees
are whole, wherever they are stored.
"""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.attempt.world import World
from training.engine.stage_checks import checked_loss
from training.errors import UserError
from training.workload import Batch, Settings, Train

_T = TypeVar("_T")


def is_sharded(settings: Settings, world_size: int) -> bool:
    """Whether each rank keeps a share of the model; a single process keeps all of it."""
    return settings.sharding == "full" and world_size > 1


def parallel(stage: Train, model: nn.Module, world: World) -> "Parallel":
    """Distribute the model, which may still be on the CPU, over all ranks' devices."""
    if is_sharded(stage.settings, world.size):
        return _Sharded(stage, model, world)
    kind = _Replicated if world.size > 1 else Parallel
    return kind(stage, model.to(world.device))


class _Work(nn.Module):
    """Anything that is done with a model, such as its loss, as a module's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, act: Callable[[nn.Module], Any]) -> Any:
        return act(self.model)


def _losses(stage: Train, batch: Batch, step: int, num_steps: int, model: nn.Module) -> Any:
    """The stage's loss with its tensors in the open, where DDP and FSDP find them."""
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

    def reducing(self, is_last: bool) -> AbstractContextManager[None]:
        """Context for forward and backward of a micro-batch; `is_last`: of its step."""
        return contextlib.nullcontext()

    def begin_step(self) -> None:
        """Prepare a step, before its first micro-batch."""

    def end_evaluation(self) -> None:
        """Free what an evaluation gathered, so that parameters may be changed or swapped."""


class _Replicated(Parallel):
    """Every rank has the whole model; DDP itself broadcasts rank 0's buffers."""

    def __init__(self, stage: Train, model: nn.Module) -> None:
        super().__init__(stage, model)
        self._ddp = _replicated(self._work, stage.settings.find_unused_parameters)
        self._work = self._ddp

    def reducing(self, is_last: bool) -> AbstractContextManager[None]:
        """Reduce gradients with the last micro-batch of a step only."""
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()


def _replicated(work: nn.Module, find_unused_parameters: bool) -> DistributedDataParallel:
    """DDP with buckets of gradients that stay as they are.

    DDP reduces all gradients of the first backward in one bucket, and lays its buckets out in the
    order in which those came. A resumed attempt begins with a first backward, too: in other buckets
    three ranks or more round other sums, so it would not equal an uninterrupted run. With
    `find_unused_parameters` DDP keeps its first layout, in the reverse order of the parameters.
    """
    if not find_unused_parameters:
        # A module's own parameters come first, so these give DDP that order.
        for number, parameter in enumerate(reversed(list(work.parameters()))):
            work.register_parameter(f"from_last_{number}", parameter)
    ddp = DistributedDataParallel(
        work, find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True
    )
    if not find_unused_parameters:
        # As DDP itself does where a rank of `join` has no backward: now, and never again.
        ddp.reducer._push_all_rebuilt_params()
        if not ddp.reducer._rebuild_buckets():
            raise AssertionError("DDP did not lay its buckets out before the first backward")
    return ddp


class _Sharded(Parallel):
    """Every rank has a share of each parameter and of its optimizer state.

    A block's parameters are gathered for its forward and backward and freed afterwards; gradients
    are reduced with every micro-batch, each rank keeping its share: whole ones are never kept.
    """

    def __init__(self, stage: Train, model: nn.Module, world: World) -> None:
        # Half a second of imports that only sharded stages need.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super().__init__(stage, model)
        self._world = world
        blocks = _blocks(stage, model)
        mesh = init_device_mesh(world.device.type, (world.size,))
        before = _shared_names(model)
        try:
            for block in (*blocks, self._work):
                fully_shard(block, mesh=mesh)
        except (ValueError, NotImplementedError) as error:
            raise UserError(
                f"stage {stage.name!r}: its model cannot be sharded: {error}; "
                "give sharding='none', or change the model"
            ) from error
        if _shared_names(model) != before:
            raise UserError(
                f"stage {stage.name!r}: sharding would split a parameter that several modules "
                "share; let `sharded_modules` name none of them, or one module with all of them"
            )
        self._gathered = [m for m in self._work.modules() if isinstance(m, FSDPModule)]

    def use(self, act: Callable[[nn.Module], _T]) -> _T:
        result: _T = self._work(act)
        return result

    def begin_step(self) -> None:
        self._world.share_buffers(self._model)

    def end_evaluation(self) -> None:
        for module in self._gathered:
            module.reshard()


def _blocks(stage: Train, model: nn.Module) -> list[nn.Module]:
    """The blocks that the stage names, nested ones first."""
    named = list(stage.sharded_modules(model))
    order = {id(module): number for number, module in enumerate(model.modules())}
    if unknown := [type(module).__name__ for module in named if id(module) not in order]:
        raise UserError(
            f"stage {stage.name!r}: `sharded_modules` gave a {unknown[0]} that is not part of "
            "its model; return modules of the model that it is called with"
        )
    unique = {id(module): module for module in named}
    return sorted(unique.values(), key=lambda module: -order[id(module)])


def _shared_names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter, which has several if modules share it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(names.values())


def broadcast_from_rank_0(model: nn.Module, world: World) -> None:
    """Copy rank 0's parameters and buffers to every rank, one by one, on the CPU."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            mine = {name: tensor.contiguous()} if world.leads else None
            tensor.copy_(world.share_tensors(mine)[name])
