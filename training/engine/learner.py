"""The mutable state of a Train stage (model, optimizer, loss scale, average), and its steps."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from training.checkpoint.read import Snapshot
from training.checkpoint.sharded import ShardedSnapshot
from training.checkpoint.slices import is_sharded as has_shards
from training.checkpoint.state import LiveState, flatten_state, unflatten_state
from training.engine.batches import MicroBatch, micro_batch_of
from training.engine.ema import MovingAverage
from training.engine.optimizer_state import create_optimizer_state, load_optimizer_state
from training.engine.parallel import broadcast_from_rank_0, is_sharded, parallel
from training.engine.precision import Scaling, autocast
from training.engine.prior import release_prior
from training.engine.scalars import Scalars
from training.engine.stage_checks import checked_optimizer, checked_start, checked_weight
from training.errors import RunFailedError, UserError
from training.randomness import seed_torch
from training.ranks.world import World
from training.workload import Batch, Inputs, Partial, Settings, Start, Train


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of a step, whose numbers may still be on the device."""

    names: tuple[str, ...]  # of the metrics
    scalars: Scalars  # the loss, the gradients' norm, then sum and count of each metric
    learning_rate: float
    is_skipped: bool  # by the loss scaler
    has_norm: bool

    def read(self) -> tuple[float, float | None, dict[str, float]]:
        """Return loss, gradient norm where it is known, and metrics of the global batch."""
        loss, norm, *pairs = self.scalars.read()
        sums = zip(self.names, pairs[::2], pairs[1::2], strict=True)
        metrics = {name: value / count for name, value, count in sums if count}
        return loss, norm if self.has_norm else None, metrics


class Learner:
    """Builds and trains the state of a stage, from a snapshot or from scratch."""

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
            group.setdefault("initial_lr", float(group["lr"]))
        # Whoever compiled or captured the optimizer holds these: they are changed in place.
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
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
        release_prior(inputs)
        if isinstance(snapshot, Snapshot):
            model.load_state_dict(snapshot.take("model"))
        if not self.is_sharded:
            model = model.to(inputs.device)
        elif snapshot is None:
            broadcast_from_rank_0(model, self._world)
        if self._settings.compile_mode is not None:
            model.compile(mode=self._settings.compile_mode)
        return model.train()

    def _load(self, snapshot: Snapshot | ShardedSnapshot) -> None:
        if isinstance(snapshot, ShardedSnapshot):
            self._fill(snapshot)
            return
        state = unflatten_state(snapshot.state["optimizer"], snapshot.take("optimizer"))
        load_optimizer_state(self._optimizer, state)
        self._scaling.load(snapshot.state.get("scaler", {}))
        if self._average is not None:
            self._average.load(snapshot.take("ema"))

    def _fill(self, snapshot: ShardedSnapshot) -> None:
        """Fill this rank's share of the state in place."""
        state: dict[str, Tensor] = {}
        create_optimizer_state(self._optimizer)
        flatten_state(self._optimizer.state_dict(), state)
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": self.model.state_dict(),
            # A parameter without a gradient so far has no state in the checkpoint.
            "optimizer": {n: t for n, t in state.items() if n in snapshot.names("optimizer")},
        }
        if self._average is not None:
            parts["ema"] = self._average.tensors
        snapshot.fill(parts)
        skeleton = snapshot.state["optimizer"]
        load_optimizer_state(self._optimizer, unflatten_state(skeleton, parts["optimizer"]))
        self._scaling.load(snapshot.state.get("scaler", {}))

    def capture(self, position: Mapping[str, Any]) -> LiveState:
        """Return all state that the next step needs, uncopied: valid until that step starts."""
        tensors: dict[str, Tensor] = {}
        skeleton = flatten_state(self._optimizer.state_dict(), tensors)
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
        """Make one optimizer step; weight and number of micro-batches count all ranks."""
        weight = checked_weight(self._stage, weight, step)
        factor = schedule_factor(self._settings, step, num_steps)
        for group, own in zip(self._optimizer.param_groups, self._rates, strict=True):
            rate = group["initial_lr"] * factor
            group["lr"] = own.fill_(rate) if isinstance(own, Tensor) else rate
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
                    # 0 / 0 is no number: what weighs nothing has no gradient either.
                    loss = loss / weight if weight else loss * 0.0
                    if mean is not None:
                        loss = loss + mean / num_micro_batches
                    if not micro.counts:
                        loss = loss * 0.0
                # DDP and FSDP average over the ranks, but the parts of the loss must be summed.
                self._scaling.backward(loss if self._world.size == 1 else loss * self._world.size)
            total = total + loss.detach()
            for name, (value, count) in metrics.items():
                if not micro.counts:
                    value, count = 0.0, 0.0
                elif name in sums:
                    value, count = sums[name][0] + value, sums[name][1] + count
                sums[name] = (value, count)
        skipped, norm = self._scaling.step(self._optimizer, self.model, self._settings.clip_norm)
        if self._average is not None and not skipped:
            self._average.update()
        names = self._same_names(tuple(sorted(sums)))
        numbers = [number for name in names for number in sums[name]]
        return StepResult(
            names=names,
            scalars=Scalars(
                [total, self._own_part(norm), *numbers], self._inputs.device, self._world
            ),
            learning_rate=self._optimizer.param_groups[0]["initial_lr"] * factor,
            is_skipped=skipped,
            has_norm=norm is not None,
        )

    def _own_part(self, norm: Tensor | None) -> Tensor | float:
        """The norm in a sum over the ranks, all of which have it: rank 0's alone counts."""
        if norm is not None and has_shards(norm):
            norm = norm.full_tensor()
        return 0.0 if norm is None or not self._world.leads else norm

    def _same_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Check that all ranks have the same metrics in every step, as the ranks sum them."""
        if self._world.size > 1:
            if self._names is None:
                self._names = set(self._world.gather(names))
            if self._names != {names}:
                raise RunFailedError(
                    f"stage {self._stage.name!r}: loss returned the metrics {', '.join(names)} on "
                    f"rank {self._world.rank}, but others on another rank or step; always return "
                    "the same metrics, with a count of 0 if there is nothing to count"
                )
        return names

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Callable[[Batch], Partial]]:
        """Yield a function that evaluates a batch in eval mode, with the moving average if any.

        All ranks start with the same state. If the model is sharded, each must evaluate equally
        many batches.
        """
        self._world.share_buffers(self.model)
        self.model.eval()
        average = contextlib.nullcontext() if self._average is None else self._average.swapped_in()
        try:
            with average:
                try:
                    yield self._parallel.evaluate
                finally:
                    self._parallel.end_evaluation()
        finally:
            self.model.train()


def refuse_unequal_batch_norm(stage: Train, model: nn.Module, world_size: int) -> None:
    """Refuse BatchNorm if this number of ranks changes its micro-batches, and so its results."""
    settings = stage.settings
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    if micro_batch_of(settings, world_size) == settings.micro_batch:
        return
    raise UserError(
        f"stage {stage.name!r} has BatchNorm and micro-batches of {settings.micro_batch}: "
        f"{world_size} processes cannot divide its global batch of {settings.global_batch} into "
        f"micro-batches of that size; give --num-processes at most "
        f"{settings.global_batch // settings.micro_batch}"
    )


def schedule_factor(settings: Settings, step: int, num_steps: int) -> float:
    """The factor for each group's own learning rate at `step` (from 0) of `num_steps`."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = (step - settings.warmup_steps) / max(1, num_steps - 1 - settings.warmup_steps)
    low = settings.final_lr_fraction
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
