"""The options of one attempt of a workload (`RunOptions`), and what they resolve to.

This includes the number of ranks: one that would change the bits or leave ranks idle is refused.

A run may start from another run's weights, or its final state. That origin is recorded in
config.json, so a replacement machine needs no options for it, and a proxy of the workload applies
it: the loop does not know about it.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from contract.errors import UserError
from contract.grammar import Interval
from contract.trainer_options import RANKS
from training.durable import (
    AttemptOptions,
    RankEnvironment,
    RunConfig,
    RunFailedError,
    StartRank,
    Store,
    Weights,
)
from training.numerics import ENGINE, code_fingerprint
from training.registry import load_workload, module_of, resolve_config, with_overrides
from training.settings import recorded
from training.workload import Inputs, Prepare, Samples, Settings, Start, Train, Workload

_Stages: TypeAlias = Callable[[Any], Sequence[Prepare | Train]]
# No instance type has as many vCPUs; torch ends the process where threads cannot be started.
_MOST_THREADS = 1024


def _forwarded(name: str) -> property:
    return property(lambda proxy: getattr(proxy._inner, name))


class _Proxy:
    """Forwards to `inner` every member of the class that it is `of`, and any other attribute."""

    def __init_subclass__(cls, of: Any = None) -> None:
        super().__init_subclass__()
        # Members with defaults too, which would otherwise hide those of `inner`.
        for name in [] if of is None else [*dir(of), *of.REQUIRED]:
            if not name.startswith("_") and name != "REQUIRED":
                setattr(cls, name, _forwarded(name))

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WorkloadProxy(_Proxy, Workload[Any], of=Workload):
    """A workload that forwards to `inner`."""

    _inner: Workload[Any]


class PrepareProxy(_Proxy, Prepare, of=Prepare):
    """A Prepare stage that forwards to `inner`."""

    _inner: Prepare


class TrainProxy(_Proxy, Train, of=Train):
    """A Train stage that forwards to `inner`."""

    _inner: Train


class Restaged(WorkloadProxy):
    """A workload with other stages, which are a function of the config as its own are."""

    def __init__(self, inner: Workload[Any], stages: _Stages) -> None:
        super().__init__(inner)
        self._stages = stages

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return self._stages(c)


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """An origin as in config.json; only an extended run has a length and `dataset`."""

    uri: str
    weights_sha256: str
    stage: str  # the stage that gets the weights, or is extended
    # The extended stage's total length, in one of the two; with neither, only weights are taken.
    epochs: int | None = None
    steps: int | None = None
    dataset: str | None = None  # its fingerprint: with another one, steps would differ

    @property
    def extends(self) -> bool:
        """Whether this is a run's final state, to train on from, not only its weights."""
        return self.epochs is not None or self.steps is not None


def origin_from_weights(uri: str, workload: Workload[Any], config: Any) -> Origin:
    """Return the origin for a file's or run's weights: the stage they came from, else the first."""
    weights = Weights.read(uri)
    names = [stage.name for stage in workload.stages(config) if isinstance(stage, Train)]
    stage = weights.about.get("stage", "")
    return Origin(
        uri=uri,
        weights_sha256=weights.sha256,
        stage=stage if stage in names else names[0],
    )


def with_origin(workload: Workload[Any], origin: Origin) -> Workload[Any]:
    """Return the workload with the origin's stage training from there."""
    kind = _Extended if origin.extends else _FromWeights

    def stages(c: Any) -> Sequence[Prepare | Train]:
        return [
            kind(stage, origin)
            if isinstance(stage, Train) and stage.name == origin.stage
            else stage
            for stage in workload.stages(c)
        ]

    return Restaged(workload, stages)


class _FromWeights(TrainProxy):
    def __init__(self, inner: Train, origin: Origin) -> None:
        super().__init__(inner)
        self._origin = origin

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Load the weights after the stage's own start, which may read data or `prior`."""
        start = super().start(m, replace(i, is_given_weights=True))
        if not start.failures:
            weights = Weights.read(self._origin.uri)
            if weights.sha256 != self._origin.weights_sha256:
                raise RunFailedError(
                    f"the weights at {self._origin.uri} are not those that this run started with; "
                    "start a new run"
                )
            foreign = self._inner.from_foreign(m, weights.tensors)
            replace(weights, tensors=foreign or weights.tensors).load_into(m, self.name)
            _log.info(f"[{self.name}] starts with the weights of {self._origin.uri}")
        return start


class _Extended(TrainProxy):
    def __init__(self, inner: Train, origin: Origin) -> None:
        super().__init__(inner)
        self._origin = origin

    @property
    def settings(self) -> Settings:
        origin = self._origin
        return replace(self._inner.settings, epochs=origin.epochs, steps=origin.steps)

    def samples(self, i: Inputs, split: str) -> Samples:
        if i.dataset.fingerprint != self._origin.dataset:
            raise UserError(
                f"the run {self._origin.uri} was trained on another dataset; extend it on the "
                "same one, or start from its weights without --extend-to"
            )
        return super().samples(i, split)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(AttemptOptions):
    """The command line's options for one attempt of a workload."""

    workload: str  # as given: a known name, or package.module:NAME
    source: Path | None = None  # the folder of that module: another one is another run
    recipe: str
    overrides: Mapping[str, str]
    dataset_uri: str
    artifacts: Store | None = None  # where runs share derived data
    init_from: str | None = None
    extend_to: str | None = None
    interval: Interval
    nan_retries: int = 2
    nan_skips: int = 0
    memory_limit_mib: int | None = None
    no_adapt: bool = False
    profile_steps: int | None = None
    environment: RankEnvironment = field(default_factory=RankEnvironment)
    num_processes: int | None = 1  # None: one per GPU
    arguments: Sequence[str] = ()  # of the command line, for the other ranks
    start_rank: StartRank | None = None  # instead of a process with those arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedWorkload:
    """A workload with its config and stages, as this run trains it."""

    workload: Workload[Any]
    config: Any
    stages: Sequence[Prepare | Train]
    origin: Origin | None = None
    fitted: Mapping[str, str] = field(default_factory=dict)  # overrides that follow from the data

    @classmethod
    def of(
        cls, workload: Workload[Any], recipe: str, overrides: Mapping[str, str]
    ) -> "ResolvedWorkload":
        """Resolve a workload as it is: no weights to start from, no memory to adapt to."""
        config = resolve_config(workload, recipe, overrides)
        return cls(workload=workload, config=config, stages=checked_stages(workload, config))

    @classmethod
    def of_run(cls, record: RunConfig) -> "ResolvedWorkload":
        """Resolve a run by its own config, whatever its recipe says by now.

        Warns of another code; UserError if that cannot have the config.
        """
        workload = load_workload(record.workload)
        if record.numerics_key.get("code") != code_fingerprint(module_of(record.workload), *ENGINE):
            other = ", ".join(filter(None, ("another code", record.bundle_uri)))
            print(f"[warning] results may differ: the run began with {other}", file=sys.stderr)
        try:
            config = resolve_config(workload, record.recipe, {})
            own = record.changed_config(recorded(config), frozenset({"source_sha256"})).items()
            config = with_overrides(config, {n: str(v) for n, v in own}, "the config of this code")
            if lost := record.changed_config(recorded(config), frozenset({"source_sha256"})):
                raise UserError(f"no text gives {', '.join(lost)} the recorded value")
            return cls(workload=workload, config=config, stages=checked_stages(workload, config))
        except UserError as error:
            raise UserError(f"use the code that {record.run_id} began with: {error}") from error

    @property
    def depends_on_ranks(self) -> bool:
        """Whether the number of ranks changes the bits, because it changes the order of sums."""
        trained = [stage.settings for stage in self.stages if isinstance(stage, Train)]
        return any(s.sharding != "none" or s.reduction != "tree" for s in trained)

    @property
    def numerics(self) -> dict[str, dict[str, Any]]:
        """By Train stage, the settings that change the bits of a result."""
        return {
            stage.name: {
                "micro_batch": stage.settings.micro_batch,
                "precision": stage.settings.precision,
                "compile": stage.settings.compile_mode,
                # Omitted where it is "none": older runs did not have it.
                **({"sharding": how} if (how := stage.settings.sharding) != "none" else {}),
                **({"reduction": "ring"} if stage.settings.reduction == "ring" else {}),
            }
            for stage in self.stages
            if isinstance(stage, Train)
        }


def checked_stages(workload: Workload[Any], config: Any) -> Sequence[Prepare | Train]:
    """Return the stages of a config; a UserError says what is wrong with them."""
    try:
        if not 1 <= config.num_threads <= _MOST_THREADS:
            given = f"num_threads is {config.num_threads}"
            raise ValueError(f"{given}; give at least 1, at most {_MOST_THREADS}")
        stages = workload.stages(config)
        for stage in stages:
            if isinstance(stage, Train):
                _ = stage.settings  # checked when they are made
    except ValueError as error:
        raise UserError(f"the config of workload {workload.name!r} is invalid: {error}") from error
    names = [stage.name for stage in stages]
    if len(set(names)) != len(names) or not any(isinstance(stage, Train) for stage in stages):
        raise UserError(
            f"workload {workload.name!r} has the stages {names}; "
            "their names must differ and at least one must train"
        )
    return stages


def usable_ranks(stages: Sequence[Prepare | Train], options: RunOptions) -> int:
    """Return the number of ranks: as asked for, or as many GPUs of each host as the stages can use.

    Checked now, and not when a stage begins, after others have been trained.
    """
    asked = options.environment.ranks(options.num_processes)
    refused = _refusal(stages, asked)
    if refused is None:
        return asked
    num_hosts, is_asked = options.environment.num_hosts, options.num_processes is not None
    counts = [n for n in reversed(RANKS) if n < asked and n % num_hosts == 0]
    usable = next((n for n in counts if _refusal(stages, n) is None), None)
    if is_asked or options.environment.world_size > 1 or usable is None:
        raise UserError(refused)
    _log.warning("[ranks] %d of %d GPUs train: %s", usable, asked, refused)
    return usable


def _refusal(stages: Sequence[Prepare | Train], num_ranks: int) -> str | None:
    """Return why a stage cannot use so many ranks: the bits would change, or ranks be idle."""
    for stage in stages:
        if num_ranks == 1 or not isinstance(stage, Train):
            continue
        settings, each = stage.settings, stage.settings.global_batch // num_ranks
        if settings.optimizer_in_backward:
            return (
                f"stage {stage.name!r} has optimizer_in_backward: {num_ranks} processes would each "
                "update with gradients of their own; pass --num-processes 1, or overrides that set "
                "optimizer_in_backward=False in its settings"
            )
        if num_ranks not in RANKS and settings.sharding == "none" and settings.reduction == "tree":
            return (
                f"stage {stage.name!r} on {num_ranks} processes: only 1, 2, 4 or 8 sum gradients "
                "in one order; set --num-processes to one of these, or --override reduction=ring, "
                "whose results depend on the number"
            )
        if settings.micro_batch > each:
            return (
                f"stage {stage.name!r} on {num_ranks} processes: a step of {settings.global_batch} "
                f"samples has {settings.global_batch // settings.micro_batch} micro-batches of "
                f"{settings.micro_batch}, so some would have nothing to do; use fewer "
                f"--num-processes{f', or a micro_batch of at most {each}' if each else ''}"
            )
    return None
