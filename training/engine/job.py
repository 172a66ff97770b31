"""What an attempt of a workload is asked for (`RunOptions`), and what that means once resolved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.grammar import Interval
from training.attempt.attempt import AttemptOptions
from training.attempt.launch import StartRank
from training.attempt.world import RankEnvironment
from training.config import resolve_config
from training.engine.origin import Origin
from training.errors import UserError
from training.store.protocol import Store
from training.workload import Prepare, Train, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(AttemptOptions):
    """What the command line decides about one attempt of a workload."""

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
    keep_compiled: bool = False  # in the store, which nobody else writes to
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

    @property
    def numerics(self) -> dict[str, dict[str, Any]]:
        """By Train stage, the settings that change the bits of a result."""
        return {
            stage.name: {
                "micro_batch": stage.settings.micro_batch,
                "precision": stage.settings.precision,
                "compile": stage.settings.compile_mode,
                # Not named where it is "none": older runs did not know it.
                **({"sharding": how} if (how := stage.settings.sharding) != "none" else {}),
            }
            for stage in self.stages
            if isinstance(stage, Train)
        }


def resolve_workload(options: RunOptions, workload: Workload[Any]) -> ResolvedWorkload:
    """A workload as it is: no weights to start from, no memory to adapt to."""
    config = resolve_config(workload, options.recipe, options.overrides)
    return ResolvedWorkload(
        workload=workload, config=config, stages=checked_stages(workload, config)
    )


def checked_stages(workload: Workload[Any], config: Any) -> Sequence[Prepare | Train]:
    """The stages of a config; UserError says what is wrong with them."""
    try:
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
