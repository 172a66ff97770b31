"""What is to be trained: the resolved config, its stages and the dataset, refused where wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contract.grammar import Interval
from training.config import resolve_config
from training.engine.origin import Origin
from training.errors import UserError
from training.interruption.watchdog import Watchdog
from training.ranks.launch import StartRank
from training.ranks.world import RankEnvironment
from training.record.retention import KEEP_NEWEST, Retention
from training.record.run_config import RunConfig, now_utc
from training.report.progress import FileProgressBar
from training.store.dataset import LocalDataset, open_dataset, sync_dataset
from training.store.open import open_store
from training.store.protocol import Store
from training.workload import Prepare, Train, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line decides about one attempt."""

    workload: Workload[Any]
    workload_name: str  # as given: a known name, or package.module:NAME
    recipe: str
    overrides: Mapping[str, str]
    dataset_uri: str
    store: Store
    artifacts: Store | None = None  # where runs share derived data
    run_id: str
    interval: Interval
    retention: Retention = KEEP_NEWEST
    lease_ttl_seconds: float
    metrics_file: Path | None
    writer: str
    bundle_uri: str | None
    scratch: Path
    origin: Origin | None = None
    prediction: Mapping[str, float | str] | None = None
    usd_per_hour: float | None = None
    profile_steps: int | None = None
    place: RankEnvironment = field(default_factory=RankEnvironment)
    num_processes: int | None = 1  # None: one per GPU
    arguments: Sequence[str] = ()  # of the command line, for the other ranks
    start_rank: StartRank | None = None  # other than with those arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the options ask for."""

    config: Any
    stages: Sequence[Prepare | Train]
    dataset: LocalDataset

    @property
    def numerics(self) -> dict[str, dict[str, Any]]:
        """By Train stage, what of its settings changes the bits of a result."""
        return {
            stage.name: {
                "micro_batch": stage.settings.micro_batch,
                "precision": stage.settings.precision,
                "compile": stage.settings.compile_mode,
                # Not named where it is none: older runs did not know it.
                **({"sharding": how} if (how := stage.settings.sharding) != "none" else {}),
            }
            for stage in self.stages
            if isinstance(stage, Train)
        }

    def record(self, options: Options, numerics_key: Mapping[str, Any]) -> RunConfig:
        """What config.json says of it, if this is the first attempt."""
        return RunConfig(
            run_id=options.run_id,
            workload=options.workload_name,
            recipe=options.recipe,
            overrides=dict(options.overrides),
            config=asdict(self.config),
            dataset=self.dataset.fingerprint,
            bundle_uri=options.bundle_uri,
            numerics_key=numerics_key,
            writer=options.writer,
            created_at=now_utc(),
            origin=asdict(options.origin) if options.origin else None,
            prediction=options.prediction,
        )


def open_job(options: Options, watchdog: Watchdog) -> Job:
    """Resolve and check everything that needs no lease; UserError says what is wrong."""
    config = resolve_config(options.workload, options.recipe, options.overrides)
    stages = _stages(options.workload, config)
    return Job(config=config, stages=stages, dataset=_open(options, watchdog))


def _stages(workload: Workload[Any], config: Any) -> Sequence[Prepare | Train]:
    try:
        stages = workload.stages(config)
        for stage in stages:
            if isinstance(stage, Train):
                _ = stage.settings  # checked when they are made
    except ValueError as error:
        raise UserError(f"the config of workload {workload.name!r} cannot be: {error}") from error
    names = [stage.name for stage in stages]
    if len(set(names)) != len(names) or not any(isinstance(stage, Train) for stage in stages):
        raise UserError(
            f"workload {workload.name!r} has the stages {names}; "
            "names must differ and one must train"
        )
    return stages


def _open(options: Options, watchdog: Watchdog) -> LocalDataset:
    folder = Path(options.dataset_uri)
    if options.dataset_uri.startswith("s3://"):
        folder = options.scratch / "dataset"
        with FileProgressBar("dataset") as show:

            def report(done: int, total: int, size: int) -> None:
                watchdog.beat()
                show(done, total, size)

            sync_dataset(open_store(options.dataset_uri), folder, report)
    dataset = open_dataset(folder)
    made_for = dataset.manifest["workload"]
    if made_for != options.workload.name:
        raise UserError(
            f"the dataset {options.dataset_uri} was made for workload {made_for!r}, "
            f"not {options.workload.name!r}; give another one"
        )
    return dataset
