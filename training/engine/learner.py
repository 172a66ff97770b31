"""What a Train stage's steps change: model, optimizer, loss scale, moving average; and one step."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from training.checkpoint.read import Snapshot
from training.checkpoint.sharded import ShardedSnapshot
from training.checkpoint.state import LiveState
from training.engine.batches import MicroBatch, micro_batch_of
from training.engine.ema import MovingAverage
from training.engine.parallel import is_sharded, parallel, shared_from_rank_0
from training.engine.precision import Scaling, autocast
from training.engine.scalars import Scalars
from training.engine.stage_checks import checked_optimizer, checked_start, checked_weight
from training.engine.trees import put_together, take_apart
from training.errors import RunFailedError, UserError
from training.randomness import seed_torch
from training.ranks.world import World
from training.workload import Batch, Inputs, Partial, Settings, Start, Train


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step whose numbers may still be on the device."""

    names: tuple[str, ...]  # of the metrics
    scalars: Scalars  # the loss, then sum and count of each metric
    learning_rate: float
    is_skipped: bool

    def read(self) -> tuple[float, dict[str, float]]:
        """Loss and metrics of the global batch."""
        loss, *pairs = self.scalars.read()
        sums = zip(self.names, pairs[::2], pairs[1::2], strict=True)
        return loss, {name: value / count for name, value, count in sums if count}


class Learner:
    """Builds what a stage trains, from a snapshot or from the start, and trains it."""

    def __init__(
        self,
        stage: Train,
        inputs: Inputs,
        world: World,
        snapshot: Snapshot | ShardedSnapshot | None,
    ) -> None:
        self._stage = stage
        self._inputs = inputs
        self._world = world
        self._settings = stage.settings
        self.start = Start()
        self._names: set[tuple[str, ...]] | None = None
        self.is_sharded = is_sharded(self._settings, world.size)
        self.model = self._build_model(snapshot)
        refuse_unequal_batch_norm(stage, self.model, world.size)
        self._parallel = parallel(stage, self.model, world)
        self._optimizer = checked_optimizer(stage, stage.optimizer(self.model), self.model)
        for group in self._optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._scaling = Scaling(self._settings.precision, inputs.device)
        decay = self._settings.ema_decay
        self._average = None if decay is None else MovingAverage(self.model, decay)
        if snapshot is not None:
            self._load(snapshot)

    def _build_model(self, snapshot: Snapshot | ShardedSnapshot | None) -> nn.Module:
        stage, inputs = self._stage, self._inputs
        seed_torch(inputs.device, "model", inputs.seed, stage.name)
        model = stage.model(inputs)
        if snapshot is None:
            seed_torch(inputs.device, "start", inputs.seed, stage.name)
            self.start = checked_start(stage, stage.start(model, inputs))
            if self.start.failures:
                raise RunFailedError(f"stage {stage.name!r} cannot start: {self.start.failures[0]}")
        elif isinstance(snapshot, Snapshot):
            model.load_state_dict(dict(snapshot.tensors["model"]))
        if not self.is_sharded:
            model = model.to(inputs.device)
        elif snapshot is None:
            shared_from_rank_0(model, self._world)
        if self._settings.compile_mode is not None:
            model.compile(mode=self._settings.compile_mode)
        return model.train()

    def _load(self, snapshot: Snapshot | ShardedSnapshot) -> None:
        if isinstance(snapshot, ShardedSnapshot):
            self._fill(snapshot)
            return
        kept = put_together(snapshot.state["optimizer"], snapshot.tensors["optimizer"])
        self._optimizer.load_state_dict(kept)
        self._scaling.load(snapshot.state.get("scaler", {}))
        if self._average is not None:
            self._average.load(snapshot.tensors["ema"])

    def _fill(self, snapshot: ShardedSnapshot) -> None:
        """Fill this rank's share of everything, in place."""
        kept: dict[str, Tensor] = {}
        create_optimizer_state(self._optimizer)
        take_apart(self._optimizer.state_dict(), kept)
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": self.model.state_dict(),
            # A parameter that never had a gradient has no state there.
            "optimizer": {n: t for n, t in kept.items() if n in snapshot.names("optimizer")},
        }
        if self._average is not None:
            parts["ema"] = self._average.tensors
        snapshot.fill(parts)
        skeleton = snapshot.state["optimizer"]
        self._optimizer.load_state_dict(put_together(skeleton, parts["optimizer"]))
        self._scaling.load(snapshot.state.get("scaler", {}))

    def capture(self, position: Mapping[str, Any]) -> LiveState:
        """Everything that the next step depends on, live: only good until it begins."""
        tensors: dict[str, Tensor] = {}
        skeleton = take_apart(self._optimizer.state_dict(), tensors)
        parts = {"model": self.model.state_dict(), "optimizer": tensors}
        if self._average is not None:
            parts["ema"] = self._average.tensors
        return LiveState(
            tensors=parts,
            state={"position": position, "optimizer": skeleton, "scaler": self._scaling.state()},
        )

    def step(
        self,
        batches: Sequence[tuple[MicroBatch, Batch]],
        *,
        weight: float,
        num_micro_batches: int,
        step: int,
        num_steps: int,
    ) -> StepResult:
        """One optimizer step; weight and number of micro-batches are those of all ranks."""
        weight = checked_weight(self._stage, weight, step)
        factor = schedule_factor(self._settings, step, num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self._optimizer.zero_grad(set_to_none=True)
        self._parallel.begin_step()
        total: Tensor | float = 0.0
        sums: dict[str, tuple[Tensor | float, float]] = {}
        for place, (micro, batch) in enumerate(batches):
            seed_torch(
                self._inputs.device,
                "noise",
                self._inputs.seed,
                self._stage.name,
                step,
                micro.number,
            )
            with self._parallel.reducing(place == len(batches) - 1):
                with autocast(self._settings.precision, self._inputs.device):
                    loss, mean, metrics = self._parallel.losses(batch, step)
                    loss = loss / weight
                    if mean is not None:
                        loss = loss + mean / num_micro_batches
                    if not micro.counts:
                        loss = loss * 0.0
                # DDP and FSDP take the mean over the ranks; the parts are to be added up.
                self._scaling.backward(loss if self._world.size == 1 else loss * self._world.size)
            total = total + loss.detach()
            for name, (value, count) in metrics.items():
                if not micro.counts:
                    value, count = 0.0, 0.0
                elif name in sums:
                    value, count = sums[name][0] + value, sums[name][1] + count
                sums[name] = (value, count)
        skipped = self._scaling.step(self._optimizer, self.model, self._settings.clip_norm)
        if self._average is not None and not skipped:
            self._average.update()
        names = self._same_names(tuple(sorted(sums)))
        numbers = [number for name in names for number in sums[name]]
        return StepResult(
            names=names,
            scalars=Scalars([total, *numbers], self._inputs.device, self._world),
            learning_rate=self._optimizer.param_groups[0]["lr"],
            is_skipped=skipped,
        )

    def _same_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The ranks add their metrics up, so every rank must have the same ones in every step."""
        if self._world.size > 1:
            if self._names is None:
                self._names = set(self._world.gather(names))
            if self._names != {names}:
                raise RunFailedError(
                    f"stage {self._stage.name!r}: the loss gave the metrics {', '.join(names)} on "
                    f"rank {self._world.rank}, which another rank or step did not; give the same "
                    "ones always, with a count of 0 where there is nothing"
                )
        return names

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Callable[[Batch], Partial]]:
        """Evaluates batches in eval mode, with the moving average where there is one.

        All ranks begin with the same. Where the model is sharded each must give as many batches.
        """
        self._world.share_buffers(self.model)
        self.model.eval()
        average = contextlib.nullcontext() if self._average is None else self._average.swapped_in()
        try:
            with average:
                try:
                    yield self._parallel.evaluate
                finally:
                    self._parallel.rest()
        finally:
            self.model.train()


def refuse_unequal_batch_norm(stage: Train, model: nn.Module, world_size: int) -> None:
    """BatchNorm computes with its micro-batch, so every number of ranks must give it the same."""
    settings = stage.settings
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    if micro_batch_of(settings, world_size) == settings.micro_batch:
        return
    raise UserError(
        f"stage {stage.name!r} has BatchNorm and micro-batches of {settings.micro_batch}: "
        f"{world_size} processes cannot share its global batch of {settings.global_batch} in "
        f"micro-batches as large; give at most {settings.global_batch // settings.micro_batch} "
        "with --num-processes"
    )


def schedule_factor(settings: Settings, step: int, num_steps: int) -> float:
    """What every group's own learning rate is multiplied by at `step` (from 0) of `num_steps`."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = (step - settings.warmup_steps) / max(1, num_steps - 1 - settings.warmup_steps)
    low = settings.final_lr_fraction
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def create_optimizer_state(optimizer: Optimizer) -> None:
    """Make the optimizer create all state that a step creates, so that it can be filled in place.

    It takes a step with zero gradients: which state there is, and how it is sharded, is its own
    business. The values, and those of the weights, are to be overwritten.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
