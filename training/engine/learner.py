"""The mutable state of a Train stage (model, optimizer, loss scale, average), and its steps."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from training.attempt.world import World
from training.engine.batches import MicroBatch, micro_batch_of
from training.engine.ema import MovingAverage
from training.engine.optimizer_state import (
    OPTIMIZER_NAMES,
    create_optimizer_state,
    load_optimizer_state,
    parameter_names,
    start_state,
    step_in_backward,
)
from training.engine.parallel import Parallel, broadcast_from_rank_0, is_sharded, parallel
from training.engine.precision import Scaling, autocast
from training.engine.prior import release_prior
from training.engine.stage_checks import (
    checked_numerics,
    checked_optimizer,
    checked_start,
    checked_weight,
)
from training.errors import RunFailedError, UserError
from training.randomness import seed_torch
from training.save.read import CheckpointContent
from training.save.resume import ShardedContent
from training.save.slices import is_sharded as has_shards
from training.save.state import LiveState, flatten_state, unflatten_state
from training.workload import Batch, Inputs, Start, Train, implements

_log = logging.getLogger(__name__)


class Scalars:
    """Sums numbers over the ranks and copies them to the host, to be read a step later."""

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
        snapshot: CheckpointContent | ShardedContent | None,
        started_with: Mapping[str, str],
    ) -> None:
        self._stage = stage
        self._inputs = inputs
        self._world = world
        self._settings = stage.settings
        self.start = Start()
        self._names: set[tuple[str, ...]] | None = None
        self.is_sharded = is_sharded(self._settings, world.size)
        self.chosen: Mapping[str, str] = {}  # by the stage, for this machine
        self.model = self._build_model(snapshot, started_with)
        _refuse_unequal_batch_norm(stage, self.model, world.size)
        self._parallel = parallel(stage, self.model, world)
        self._optimizer = checked_optimizer(stage, stage.optimizer(self.model), self.model)
        for group in self._optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        # Whoever compiled or captured the optimizer holds these: they are changed in place.
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._start_optimizer()
        if self._settings.optimizer_in_backward:
            step_in_backward(self._optimizer)
        self._scaling = Scaling(self._settings.precision, inputs.device)
        settings = self._settings
        self._average: MovingAverage | None = None
        if settings.ema_decay is not None:
            self._average = MovingAverage(
                self.model, settings.ema_decay, with_buffers=settings.ema_buffers
            )
        if snapshot is not None:
            self._load(snapshot)

    def _build_model(
        self, snapshot: CheckpointContent | ShardedContent | None, started_with: Mapping[str, str]
    ) -> nn.Module:
        stage, inputs = self._stage, self._inputs
        seed_torch(inputs.device, "model", inputs.seed, stage.name)
        model = stage.model(inputs)
        self.chosen = self._choose(model, started_with)
        if snapshot is None:
            seed_torch(inputs.device, "start", inputs.seed, stage.name)
            if implements(stage, Train.refusals) and (
                refused := stage.refusals(inputs.dataset.meta)
            ):
                raise RunFailedError(f"stage {stage.name!r} cannot start: {refused[0]}")
            self.start = checked_start(stage, stage.start(model, inputs))
            if self.start.failures:
                raise RunFailedError(f"stage {stage.name!r} cannot start: {self.start.failures[0]}")
        release_prior(inputs)
        if isinstance(snapshot, CheckpointContent):
            model.load_state_dict(snapshot.take("model"))
        if not self.is_sharded:
            model = model.to(inputs.device)
        elif snapshot is None:
            broadcast_from_rank_0(model, self._world)
        if self._settings.compile_mode is not None:
            # Not dynamic: whether torch makes code for any size depends on what this process has
            # compiled before, and so would the bits after an interruption. So would they if the
            # ninth size of a batch ran uncompiled, as it does by default.
            from torch._dynamo import config

            config.recompile_limit = config.accumulated_recompile_limit
            # As model.compile(), but from a function of ours: before torch 2.14 a model of one of
            # torch's own classes, as an nn.Sequential, would stay uncompiled without a word.
            model._compiled_call_impl = torch.compile(
                lambda *args, **kwargs: model._call_impl(*args, **kwargs),  # type: ignore[no-untyped-call]
                mode=self._settings.compile_mode,
                dynamic=False,
            )
        return model.train()

    def _choose(self, model: nn.Module, started_with: Mapping[str, str]) -> dict[str, str]:
        """Rank 0 chooses, and the others after it."""

        def choose(like: Mapping[str, str]) -> dict[str, str]:
            chosen = self._stage.numerics(model, self._inputs, like)
            return checked_numerics(self._stage, chosen)

        first = self._world.share(choose(started_with) if self._world.leads else {})
        if first and self._world.leads:
            named = ", ".join(f"{what} {which}" for what, which in first.items())
            _log.info("[ok] %s computes by: %s", self._stage.name, named)
        if not self._world.leads:
            choose(first)
        return first

    def _start_optimizer(self) -> None:
        """Give the optimizer the state that the stage starts it with, and keep no copy of it."""
        state, self.start = self.start.optimizer, replace(self.start, optimizer={})
        if state and self.is_sharded:
            raise UserError(
                f"stage {self._stage.name!r}: start gave a state to start the optimizer from, "
                "which is whole, but the model is sharded over ranks; give sharding='none', or "
                "let the optimizer start without state"
            )
        start_state(self._stage, self._optimizer, self.model, state)

    def _load(self, snapshot: CheckpointContent | ShardedContent) -> None:
        if isinstance(snapshot, ShardedContent):
            self._fill(snapshot)
            return
        state = unflatten_state(snapshot.state["optimizer"], snapshot.take("optimizer"))
        load_optimizer_state(self._optimizer, state)
        self._scaling.load(snapshot.state.get("scaler", {}))
        if self._average is not None:
            self._average.load(snapshot.take("ema"))

    def _fill(self, snapshot: ShardedContent) -> None:
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
            state={
                "position": position,
                "optimizer": skeleton,
                OPTIMIZER_NAMES: parameter_names(self._optimizer, self.model),
                "scaler": self._scaling.state(),
            },
        )

    def step(
        self,
        batches: Sequence[tuple[MicroBatch, Batch]],
        *,
        weight: float,
        num_micro_batches: int,
        step: int,
        num_steps: int,
        lr_factor: float,
    ) -> StepResult:
        """Make one optimizer step; weight and number of micro-batches count all ranks."""
        weight = checked_weight(self._stage, weight, step)
        for group, own in zip(self._optimizer.param_groups, self._rates, strict=True):
            rate = group["initial_lr"] * lr_factor
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
                    loss, mean, metrics = self._parallel.losses(batch, step, num_steps)
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
        skipped, norm = False, None
        if not self._settings.optimizer_in_backward:
            clip_norm = self._settings.clip_norm
            skipped, norm = self._scaling.step(self._optimizer, self.model, clip_norm)
        is_averaged = (step + 1) % self._settings.ema_every_steps == 0
        if self._average is not None and is_averaged and not skipped:
            self._average.update()
        names = self._same_names(tuple(sorted(sums)))
        numbers = [number for name in names for number in sums[name]]
        return StepResult(
            names=names,
            scalars=Scalars(
                [total, self._own_part(norm), *numbers], self._inputs.device, self._world
            ),
            learning_rate=self._optimizer.param_groups[0]["initial_lr"] * lr_factor,
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
                    f"rank {self._world.rank}, but different ones on another rank or "
                    "step; always return the same metrics, with a count of 0 if there is nothing "
                    "to count"
                )
        return names

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Parallel]:
        """Yield the model in eval mode, with the moving average if any.

        All ranks start with the same state. If the model is sharded, each must use it equally
        often.
        """
        self.model.eval()
        average = contextlib.nullcontext() if self._average is None else self._average.swapped_in()
        try:
            with average:
                # Of the averages too: each rank has averaged buffers of its own.
                self._world.share_buffers(self.model)
                try:
                    yield self._parallel
                finally:
                    self._parallel.end_evaluation()
        finally:
            self.model.train()


def _refuse_unequal_batch_norm(stage: Train, model: nn.Module, world_size: int) -> None:
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
