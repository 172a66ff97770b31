"""The mutable state of a Train stage (model, optimizer, loss scale, average), and its steps."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contract.errors import UserError
from training.durable import (
    CheckpointContent,
    LiveState,
    RunFailedError,
    ShardedContent,
    World,
    misfit,
)
from training.durable import is_sharded as has_shards
from training.engine.batches import MicroBatch
from training.engine.optimizer import (
    OPTIMIZER_NAMES,
    MovingAverage,
    Scaling,
    autocast,
    create_optimizer_state,
    flatten_state,
    load_optimizer_state,
    parameter_names,
    start_state,
    step_in_backward,
    unflatten_state,
)
from training.engine.parallel import (
    Parallel,
    broadcast_from_rank_0,
    is_sharded,
    named_blocks,
    parallel,
)
from training.engine.reduction import SHARES, share_of, tree_sum
from training.engine.stage_checks import (
    checked_numerics,
    checked_optimizer,
    checked_start,
    checked_weight,
    extra_state,
    loadable_state,
)
from training.numerics import seed_torch
from training.workload import Batch, Inputs, Start, Train, implements, release_prior

_log = logging.getLogger(__name__)


class _Scalars:
    """Sums numbers over all shares of a step, on the host, where they are read a step later.

    `by_share` has this rank's shares, `num` numbers each; `own` are the same on all ranks.
    """

    def __init__(
        self,
        by_share: Mapping[int, Sequence[Tensor | float]],
        num: int,
        own: Sequence[Tensor | float],
        device: torch.device,
        world: World,
    ) -> None:
        self._num = num
        none: Sequence[Tensor | float] = [0.0] * num
        values = [v for share in range(SHARES) for v in by_share.get(share, none)]
        values += own if world.leads else [0.0] * len(own)
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
        # Each number comes from one rank, and all others add 0: no order changes the sum.
        self._work = world.sum_later(self._sums)
        if device.type == "cuda":
            if self._work is not None:
                self._work.wait()  # the device waits, not this thread
            self._host = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self._host.copy_(self._sums, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        """Return the sums, then `own`, waiting only for work queued before them."""
        values, num = self._values(), self._num
        sums = [tree_sum(values[n : SHARES * num : num]) for n in range(num)]
        return sums + values[SHARES * num :]

    def _values(self) -> list[float]:
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
    scalars: _Scalars  # the loss, sum and count of each metric, then the gradients' norm
    learning_rate: float
    is_skipped: bool  # by the loss scaler
    has_norm: bool

    def read(self) -> tuple[float, float | None, dict[str, float]]:
        """Return loss, gradient norm where it is known, and metrics of the global batch."""
        loss, *pairs, norm = self.scalars.read()
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
        self._names: tuple[str, ...] | None = None
        self.is_sharded = is_sharded(self._settings, world.size)
        self.chosen: Mapping[str, str] = {}  # by the stage, for this machine
        self.model = self._build_model(snapshot, started_with)
        self._parallel = parallel(stage, self.model, world)
        self._optimizer = checked_optimizer(stage, stage.optimizer(self.model), self.model)
        for group in self._optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        # A compiled or captured optimizer holds these, so they are changed in place.
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._start_optimizer()
        if self._settings.optimizer_in_backward:
            step_in_backward(self._optimizer)
        self._scaling = Scaling(self._settings.precision, inputs.device)
        self._average: MovingAverage | None = None
        if (decay := self._settings.ema_decay) is not None:
            with_buffers = self._settings.ema_buffers
            self._average = MovingAverage(self.model, decay, with_buffers=with_buffers)
        if snapshot is not None:
            self._load(snapshot)

    def _build_model(
        self, snapshot: CheckpointContent | ShardedContent | None, started_with: Mapping[str, str]
    ) -> nn.Module:
        stage, inputs = self._stage, self._inputs
        seed_torch(inputs.device, "model", inputs.seed, stage.name)
        model = stage.model(inputs)
        self._built, self._unset = loadable_state(model)
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
            tensors = {**snapshot.take("model"), **snapshot.state.get("extra", {})}
            if problems := misfit(self._built, tensors):
                raise UserError(
                    f"the checkpoint does not fit the model of stage {stage.name!r}: {problems}; "
                    "resume the run with the code that it began with, or start a new run"
                )
            model.load_state_dict(tensors)
        if snapshot is None and self._world.size > 1:
            broadcast_from_rank_0(model, self._world)
        if not self.is_sharded:
            model = model.to(inputs.device)
        if self._settings.compile_mode is not None:
            compile_blocks(stage, model, self._settings.compile_mode)
        return model.train()

    def _choose(self, model: nn.Module, started_with: Mapping[str, str]) -> dict[str, str]:
        """Let rank 0 choose, and the other ranks follow it."""

        def choose(like: Mapping[str, str]) -> dict[str, str]:
            chosen = self._stage.numerics(model, self._inputs, like)
            return checked_numerics(self._stage, chosen)

        first = self._world.share(choose(started_with) if self._world.leads else {})
        if first and self._world.leads:
            named = ", ".join(f"{what} {which}" for what, which in first.items())
            _log.info("[ok] %s uses: %s", self._stage.name, named)
        if not self._world.leads:
            choose(first)
        return first

    def _start_optimizer(self) -> None:
        """Load the state that the stage starts the optimizer with, and keep no copy of it."""
        state, self.start = self.start.optimizer, replace(self.start, optimizer={})
        if state and self.is_sharded:
            raise UserError(
                f"stage {self._stage.name!r}: start returned a complete optimizer state, but the "
                "model is sharded over ranks; set sharding='none', or let the optimizer start "
                "without state"
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
        create_optimizer_state(self._optimizer, snapshot.names("optimizer"))
        flatten_state(self._optimizer.state_dict(), state)
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": {n: t for n, t in self.model.state_dict().items() if isinstance(t, Tensor)},
            # A parameter without a gradient so far has no state in the checkpoint.
            "optimizer": {n: t for n, t in state.items() if n in snapshot.names("optimizer")},
        }
        if self._average is not None:
            parts["ema"] = self._average.tensors
        snapshot.fill(parts)
        self.model.load_state_dict(snapshot.state.get("extra", {}), strict=False)
        skeleton = snapshot.state["optimizer"]
        load_optimizer_state(self._optimizer, unflatten_state(skeleton, parts["optimizer"]))
        self._scaling.load(snapshot.state.get("scaler", {}))

    def capture(self, position: Mapping[str, Any]) -> LiveState:
        """Return all state that the next step needs, uncopied: valid until that step starts."""
        tensors: dict[str, Tensor] = {}
        skeleton = flatten_state(self._optimizer.state_dict(), tensors)
        saved = self.model.state_dict()
        extra = extra_state(self._stage, self.model, self._built, saved)
        parts = {"model": {n: t for n, t in saved.items() if n not in extra}, "optimizer": tensors}
        if self._average is not None:
            parts["ema"] = self._average.tensors
        return LiveState(
            tensors=parts,
            state={
                "position": position,
                "optimizer": skeleton,
                OPTIMIZER_NAMES: parameter_names(self._optimizer, self.model),
                "scaler": self._scaling.state(),
                "extra": extra,
                "unset": self._unset,
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
        own_time: contextlib.AbstractContextManager[object],
    ) -> StepResult:
        """Make one optimizer step; weight and number of micro-batches count all ranks.

        Within `own_time` no other rank is waited for, unless the model is sharded.
        """
        weight = checked_weight(self._stage, weight, step)
        for group, own in zip(self._optimizer.param_groups, self._rates, strict=True):
            rate = group["initial_lr"] * lr_factor
            group["lr"] = own.fill_(rate) if isinstance(own, Tensor) else rate
        self._optimizer.zero_grad(set_to_none=True)
        self._parallel.begin_step(num_micro_batches)
        by_share: dict[int, _ShareSums] = {}
        seed = ("noise", self._inputs.seed, self._stage.name, step)
        with own_time:
            for place, (micro, batch) in enumerate(batches):
                seed_torch(self._inputs.device, *seed, micro.number)
                with self._parallel.adding(place):
                    with autocast(self._settings.precision, self._inputs.device):
                        loss, mean, metrics = self._parallel.losses(batch, step, num_steps)
                        # As DETR does, whose images without objects are background to learn.
                        loss = loss / (weight or 1.0)
                        if mean is not None:
                            loss = loss + mean / num_micro_batches
                        if not micro.counts:
                            loss = loss * 0.0
                    # FSDP averages over the ranks, but the parts of the loss must be summed.
                    self._scaling.backward(loss * self._world.size if self.is_sharded else loss)
                share = share_of(micro.number, num_micro_batches)
                by_share.setdefault(share, _ShareSums()).add(loss.detach(), metrics, micro.counts)
        self._parallel.end_step()
        skipped, norm = False, None
        if not self._settings.optimizer_in_backward:
            clip_norm = self._settings.clip_norm
            skipped, norm = self._scaling.step(self._optimizer, self.model, clip_norm)
        is_averaged = (step + 1) % self._settings.ema_every_steps == 0
        if self._average is not None and is_averaged and not skipped:
            self._average.update()
        names = self._same_names({sums.names for sums in by_share.values()})
        return StepResult(
            names=names,
            scalars=_Scalars(
                {share: sums.values(names) for share, sums in by_share.items()},
                1 + 2 * len(names),
                [0.0 if norm is None else norm.full_tensor() if has_shards(norm) else norm],
                self._inputs.device,
                self._world,
            ),
            learning_rate=self._optimizer.param_groups[0]["initial_lr"] * lr_factor,
            is_skipped=skipped,
            has_norm=norm is not None,
        )

    def _same_names(self, own: set[tuple[str, ...]]) -> tuple[str, ...]:
        """The metrics' names: the same on all ranks in every step, as the ranks sum them."""
        if self._world.size == 1:
            return tuple(sorted({name for names in own for name in names}))
        known = {self._names} if self._names is not None else set().union(*self._world.gather(own))
        own = own | known
        if len(own) > 1:
            one, other = (", ".join(names) or "none" for names in sorted(own)[:2])
            raise RunFailedError(
                f"stage {self._stage.name!r}: loss returned the metrics {one}, but {other} on "
                "another rank or step; always return the same metrics, with a count of 0 if there "
                "is nothing to count"
            )
        (self._names,) = own
        return self._names

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
                if self.is_sharded:
                    # With averages too: each rank has averaged its own buffers.
                    self._world.share_buffers(self.model)
                try:
                    yield self._parallel
                finally:
                    self._parallel.end_evaluation()
        finally:
            self.model.train()


class _ShareSums:
    """The loss and the metrics of a share's micro-batches, in their order."""

    def __init__(self) -> None:
        self._loss: Tensor | float = 0.0
        self._metrics: dict[str, tuple[Tensor | float, float]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._metrics))

    def add(
        self, loss: Tensor, metrics: Mapping[str, tuple[Tensor | float, float]], counts: bool
    ) -> None:
        """Add a micro-batch; one that does not count adds names only."""
        self._loss = self._loss + loss
        for name, (value, count) in metrics.items():
            if not counts:
                value, count = 0.0, 0.0
            elif name in self._metrics:
                before = self._metrics[name]
                value, count = before[0] + value, before[1] + count
            self._metrics[name] = (value, count)

    def values(self, names: Sequence[str]) -> list[Tensor | float]:
        """The loss, then sum and count of each metric."""
        return [
            self._loss,
            *(number for name in names for number in self._metrics.get(name, (0.0, 0.0))),
        ]


_NO_LIMIT = 2**31


def compile_blocks(stage: Train, model: nn.Module, mode: str) -> None:
    """Let torch compile each block that the stage names, or the whole model; equals share code."""
    # Not dynamic: whether torch compiles code for all sizes depends on what this process compiled
    # before, so the bits could differ after an interruption. They also could if the ninth size of
    # a batch ran uncompiled, or the 257th of all that this process has met, as they do by default.
    from torch._dynamo import config

    config.recompile_limit = config.accumulated_recompile_limit = _NO_LIMIT
    for block in named_blocks(stage, model) or [model]:
        # Like block.compile(), but through a function of ours: before torch 2.14 a module of one of
        # torch's own classes, such as nn.Sequential, silently stayed uncompiled.
        block._compiled_call_impl = torch.compile(partial(_call, block), mode=mode, dynamic=False)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
