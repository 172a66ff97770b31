"""One attempt of a run: take the lease, resume, go through the stages, finish.

Ends in one of five ways, which are the exit codes: finished, failed, interrupted and saved, lease
lost, or refused because of the user's mistake.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.conclusion import conclude
from training.config import Interval, resolve_config
from training.dataset import LocalDataset, open_dataset, sync_dataset
from training.distributed import Place, World
from training.errors import EXIT_FAILED, EXIT_FINISHED, RunFailedError, UserError
from training.events import Events
from training.head import Head, Lease, LeaseLostError, acquire
from training.interruption import Interruption
from training.metrics import Metrics
from training.numerics import configure, numerics_key
from training.origin import Origin
from training.position import Attempt
from training.progress import Bar
from training.record import RunRecord, now_utc, settle_record
from training.retention import KEEP_NEWEST, Retention
from training.stages import StageSequence
from training.store import Store, StoreError, open_store
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


def run_attempt(options: Options, interruption: Interruption) -> int:
    """Run to the end of the run or of this attempt; return the exit code of an ended run."""
    began = time.monotonic()
    workload = options.workload
    config = resolve_config(workload, options.recipe, options.overrides)
    stages = _stages(workload, config)
    dataset = _open(options)
    device = configure(num_threads=config.num_threads, deterministic=config.deterministic)
    key = numerics_key(
        device, world=1, deterministic=config.deterministic, stages=_precisions(stages)
    )
    record = settle_record(
        options.store,
        RunRecord(
            run_id=options.run_id,
            workload=options.workload_name,
            recipe=options.recipe,
            overrides=dict(options.overrides),
            config=asdict(config),
            dataset=dataset.fingerprint,
            bundle_uri=options.bundle_uri,
            numerics_key=key,
            writer=options.writer,
            created_at=now_utc(),
            origin=asdict(options.origin) if options.origin else None,
            prediction=options.prediction,
        ),
        workload.placement_fields,
    )
    lease = _take_lease(options, interruption)
    if isinstance(lease, Head):
        return say_ended(options.store, lease)
    events = Events(options.store, options.writer)
    events.emit("take-over", "ok", generation=lease.head.generation)
    metrics = Metrics(options.store, lease.head.generation, lease.head.nonce, options.metrics_file)
    attempt = Attempt(
        store=options.store,
        held=lease,
        metrics=metrics,
        events=events,
        interruption=interruption,
        interval=options.interval,
        retention=options.retention,
        scratch=options.scratch,
        world=World(Place(), device),
    )
    run = StageSequence(attempt, config, stages, dataset, device, record, key, began)
    try:
        with _ending(attempt):
            run.go()
    finally:
        conclude(options.store, record, lease.head)
    return EXIT_FINISHED


def say_ended(store: Store, head: Head) -> int:
    """Say that a run has ended already; return the exit code."""
    if head.state == "finished":
        print(f"[ok] {store.uri} is finished: weights {head.weights_sha256}", flush=True)
        return EXIT_FINISHED
    print(f"[failed] {store.uri} has failed: {head.reason}; begin a new run id", flush=True)
    return EXIT_FAILED


@contextlib.contextmanager
def _ending(attempt: Attempt) -> Any:
    """Leave nothing behind, however the attempt ends: the lease released, the metrics flushed."""
    try:
        yield
    except RunFailedError as error:
        attempt.metrics.flush()
        attempt.events.emit("failed", "failed", message=str(error))
        attempt.lease.fail(str(error))
        raise
    finally:
        # What ends the attempt is more telling than a release that did not work either.
        with contextlib.suppress(LeaseLostError, StoreError):
            attempt.lease.release()
        with contextlib.suppress(StoreError):
            attempt.metrics.flush()
        if attempt.lease.head.state == "released":
            attempt.events.emit("released", "ok", generation=attempt.generation)
        attempt.lease.close()
        attempt.metrics.close()


def _stages(workload: Workload[Any], config: Any) -> Sequence[Prepare | Train]:
    try:
        stages = workload.stages(config)
        _precisions(stages)  # settings are checked when they are made
    except ValueError as error:
        raise UserError(f"the config of workload {workload.name!r} cannot be: {error}") from error
    names = [stage.name for stage in stages]
    if len(set(names)) != len(names) or not any(isinstance(stage, Train) for stage in stages):
        raise UserError(
            f"workload {workload.name!r} has the stages {names}; "
            "names must differ and one must train"
        )
    return stages


def _precisions(stages: Sequence[Prepare | Train]) -> dict[str, dict[str, Any]]:
    return {
        stage.name: {
            "micro_batch": stage.settings.micro_batch,
            "precision": stage.settings.precision,
            "compile": stage.settings.compile_mode,
        }
        for stage in stages
        if isinstance(stage, Train)
    }


def _open(options: Options) -> LocalDataset:
    folder = Path(options.dataset_uri)
    if options.dataset_uri.startswith("s3://"):
        folder = options.scratch / "dataset"
        with Bar("dataset", 1) as bar:
            sync_dataset(
                open_store(options.dataset_uri),
                folder,
                lambda done, total, size: bar.show(done, f"of {total} files, {size / 1e6:.1f} MB"),
            )
    dataset = open_dataset(folder)
    made_for = dataset.manifest["workload"]
    if made_for != options.workload.name:
        raise UserError(
            f"the dataset {options.dataset_uri} was made for workload {made_for!r}, "
            f"not {options.workload.name!r}; give another one"
        )
    return dataset


def _take_lease(options: Options, interruption: Interruption) -> Lease | Head:
    def waiting(writer: str) -> None:
        print(
            f"[lease] held by {writer}; taking over when it stands still for "
            f"{options.lease_ttl_seconds:g} s",
            flush=True,
        )

    wait: Callable[[float], bool] = interruption.wait
    return acquire(
        options.store,
        options.run_id,
        options.writer,
        options.lease_ttl_seconds,
        wait,
        waiting,
    )
