"""What one attempt is asked for (`RunOptions`), and what that means once resolved (`Job`)."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contract.grammar import Interval
from training.attempt.launch import StartRank
from training.attempt.watchdog import Watchdog
from training.attempt.world import RankEnvironment
from training.config import resolve_config
from training.engine.origin import Origin
from training.errors import EXIT_USER, UserError
from training.record.retention import KEEP_NEWEST, Retention
from training.record.run_config import RunConfig, now_utc
from training.report.progress import FileProgressBar
from training.settings import recorded
from training.store.dataset import read_manifest
from training.store.local_dataset import LocalDataset, is_syncing, open_dataset
from training.store.open import open_store
from training.store.protocol import Store, StoreError
from training.workload import Prepare, Train, Workload

_POLL_SECONDS = 0.1
# A machine's boot tries a sync that fails again within half of this (userdata/run_step.py).
_PATIENCE_SECONDS = 60.0
# What takes no longer than this needs no progress bar.
_QUIET_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What the command line decides about one attempt."""

    workload: str  # as given: a known name, or package.module:NAME
    recipe: str
    overrides: Mapping[str, str]
    dataset_uri: str
    store: Store
    artifacts: Store | None = None  # where runs share derived data
    run_id: str
    init_from: str | None = None
    extend_to: str | None = None
    interval: Interval
    retention: Retention = KEEP_NEWEST
    lease_ttl_seconds: float
    nan_retries: int = 2
    nan_skips: int = 0
    memory_limit_mib: int | None = None
    no_adapt: bool = False
    keep_compiled: bool = False  # in the store, which nobody else writes to
    metrics_file: Path | None = None
    writer: str
    bundle_uri: str | None = None
    scratch: Path
    prediction: Mapping[str, float | str] | None = None
    usd_per_hour: float | None = None
    profile_steps: int | None = None
    environment: RankEnvironment = field(default_factory=RankEnvironment)
    num_processes: int | None = 1  # None: one per GPU
    arguments: Sequence[str] = ()  # of the command line, for the other ranks
    start_rank: StartRank | None = None  # instead of a process with those arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
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

    def run_config(
        self, options: RunOptions, dataset: LocalDataset, numerics_key: Mapping[str, Any]
    ) -> RunConfig:
        """What config.json says of the run, if this is its first attempt."""
        return RunConfig(
            run_id=options.run_id,
            workload=options.workload,
            recipe=options.recipe,
            overrides=dict(options.overrides),
            config=recorded(self.config),
            dataset=dataset.fingerprint,
            bundle_uri=options.bundle_uri,
            numerics_key=numerics_key,
            writer=options.writer,
            created_at=now_utc(),
            origin=asdict(self.origin) if self.origin else None,
            prediction=options.prediction,
        )


def resolve_job(options: RunOptions, workload: Workload[Any]) -> Job:
    """The job of a workload as it is: no weights to start from, no memory to adapt to."""
    config = resolve_config(workload, options.recipe, options.overrides)
    return Job(workload=workload, config=config, stages=checked_stages(workload, config))


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


@contextlib.contextmanager
def run_dataset(
    options: RunOptions, workload: Workload[Any], watchdog: Watchdog
) -> Iterator[LocalDataset]:
    """The run's dataset; UserError if it is of another workload.

    From S3 it is synced by another process, and opens as soon as that has begun: what needs a file
    waits for it. A process, because a sync's checksums and connections would slow the trainer down.
    """
    with contextlib.ExitStack() as stack:
        folder, patience_seconds = Path(options.dataset_uri), _PATIENCE_SECONDS
        if options.dataset_uri.startswith("s3://"):
            folder, patience_seconds = options.scratch / "dataset", 0.0
            stack.enter_context(_synced(options.dataset_uri, folder, watchdog))
        began = time.monotonic()
        with FileProgressBar("verifying the dataset") as show:

            def report(done: int, total: int, size: int) -> None:
                watchdog.beat()
                if time.monotonic() - began > _QUIET_SECONDS:
                    show(done, total, size)

            dataset = open_dataset(
                folder,
                progress=report,
                waiting=watchdog.beat,
                patience_seconds=patience_seconds,
            )
        made_for = dataset.manifest["workload"]
        if made_for != workload.name:
            raise UserError(
                f"the dataset {options.dataset_uri} was made for workload {made_for!r}, "
                f"not {workload.name!r}; give another one"
            )
        # A loader's worker may wait for a file as long as the sync takes.
        watchdog.excuse = lambda: dataset.is_arriving
        yield dataset


@contextlib.contextmanager
def _synced(uri: str, folder: Path, watchdog: Watchdog) -> Iterator[None]:
    """Start the sync into `folder`; stop it when the attempt ends."""
    read_manifest(open_store(uri))  # what is missing or forbidden is said here
    command = [sys.executable, "-m", "training", "data", "sync"]
    # A session of its own: Ctrl-C is for the trainer, which saves and then stops the sync.
    sync = subprocess.Popen(
        [*command, "--dataset-uri", uri, "--out", str(folder)], start_new_session=True
    )
    try:
        while sync.poll() is None and not is_syncing(folder):
            watchdog.beat()
            time.sleep(_POLL_SECONDS)
        if sync.returncode:
            # Only a mistake is the user's: after anything else a restart may help.
            kind = UserError if sync.returncode == EXIT_USER else StoreError
            raise kind(f"the dataset {uri} could not be synced; see the lines above")
        yield
    finally:
        sync.terminate()
        sync.wait()
