"""One attempt of a run: take the lease, resume, go through the stages, finish.

Ends in one of five ways, which are the exit codes: finished, failed, interrupted and saved, lease
lost, or refused because of the user's mistake.
"""

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from training.engine.job import Job, Options, open_job
from training.engine.numerics import configure, numerics_key
from training.engine.stages import StageSequence
from training.errors import EXIT_FAILED, EXIT_FINISHED, RankLostError, RunFailedError
from training.interruption.notice import InterruptedRunError
from training.interruption.supervisor import Supervisor
from training.ranks.context import Attempt
from training.ranks.launch import OtherRanks, interpreters
from training.ranks.world import RankEnvironment, World
from training.record.events import Events, SilentEvents
from training.record.head import Head
from training.record.lease import Lease, LeaseLostError, acquire
from training.record.metrics import Metrics, SilentMetrics
from training.record.run_config import RunConfig, ensure_run_config
from training.report.meter import Meter
from training.report.profiler import StepProfiler
from training.report.receipt import conclude
from training.store.protocol import Store, StoreError

# A connection breaks a moment before its process has ended.
_RANK_SECONDS = 1.0


def run_attempt(options: Options, supervisor: Supervisor) -> int:
    """Run to the end of the run or of this attempt; return the exit code of an ended run."""
    began = time.monotonic()
    job = open_job(options, supervisor.watchdog)
    with _ranks(options, supervisor) as place:
        device = configure(
            num_threads=job.config.num_threads,
            deterministic=job.config.deterministic,
            local_rank=place.local_rank,
        )
        key = numerics_key(
            device,
            world=place.world_size,
            deterministic=job.config.deterministic,
            stages=job.numerics,
        )
        if place.rank > 0:
            return _follow(options, supervisor, job, World(place, device), key, began)
        record = ensure_run_config(
            options.store, job.record(options, key), options.workload.placement_fields
        )
        lease = _take_lease(options, supervisor)
        world = World(place, device)
        if isinstance(lease, Head):
            return world.share((say_ended(options.store, lease), record))[0]
        return _lead(options, supervisor, job, world, (record, lease), key, began)


@contextlib.contextmanager
def _ranks(options: Options, supervisor: Supervisor) -> Iterator[RankEnvironment]:
    """This process's place; on a machine with several GPUs it becomes rank 0 of as many."""
    place = options.place
    num_processes = place.ranks(options.num_processes)
    if place.world_size > 1 or num_processes == 1:
        yield place
        return
    options.scratch.mkdir(parents=True, exist_ok=True)
    meeting = options.scratch / f"rendezvous-{secrets.token_hex(4)}"
    start = options.start_rank or interpreters(options.arguments, options.scratch)
    siblings = OtherRanks(start, num_processes, meeting)
    supervisor.last_resort.lead(siblings.show_stacks)
    siblings.watch(supervisor.last_resort.fail)
    try:
        yield replace(place, world_size=num_processes, rendezvous=meeting.absolute().as_uri())
    except RuntimeError as error:
        # A collective's error names a connection; the rank that it led to tells more.
        is_collective = type(error) is RuntimeError or isinstance(error, dist.DistError)
        lost = siblings.lost(_RANK_SECONDS) if is_collective else None
        if lost is None:
            raise
        raise RankLostError(f"{lost}; the next attempt goes on from the last commit") from error
    finally:
        supervisor.last_resort.stand_down()
        siblings.close()
        meeting.unlink(missing_ok=True)


def _lead(
    options: Options,
    supervisor: Supervisor,
    job: Job,
    world: World,
    held: tuple[RunConfig, Lease],
    key: Mapping[str, Any],
    began: float,
) -> int:
    record, lease = held
    supervisor.last_resort.hold(lease)
    world.share((None, record))
    events = Events(options.store, options.writer)
    price = {} if options.usd_per_hour is None else {"usd_per_hour": options.usd_per_hour}
    events.emit("take-over", "ok", generation=lease.head.generation, **price)
    profiler = None
    if options.profile_steps is not None:
        profiler = StepProfiler(
            options.profile_steps, options.store, lease.head.generation, options.scratch
        )
    attempt = Attempt(
        store=options.store,
        held=lease,
        metrics=Metrics(
            options.store, lease.head.generation, lease.head.nonce, options.metrics_file
        ),
        events=events,
        supervisor=supervisor,
        interval=options.interval,
        retention=options.retention,
        scratch=options.scratch,
        world=world,
        artifacts=options.artifacts,
        numerics=key,
        meter=Meter(usd_per_hour=options.usd_per_hour, began=began),
        profiler=profiler,
    )
    run = StageSequence(
        attempt, job.config, job.stages, job.dataset, world.device, record, key, began
    )
    try:
        with _leaving(world), _ending(attempt):
            run.go()
    finally:
        if profiler is not None:
            profiler.close()
        conclude(options.store, record, lease.head)
    return EXIT_FINISHED


def _follow(
    options: Options,
    supervisor: Supervisor,
    job: Job,
    world: World,
    key: Mapping[str, Any],
    began: float,
) -> int:
    """A rank above 0: trains along, and writes nothing but its shards of derived data."""
    supervisor.last_resort.follow()
    supervisor.extra_time.follow()
    # Rank 0 may be at work on its own for long, and its watchdog is for all.
    supervisor.watchdog.close()
    code, record = world.share((None, None))
    if code is not None:
        return code
    assert record is not None
    attempt = Attempt(
        store=options.store,
        held=None,
        metrics=SilentMetrics(),
        events=SilentEvents(),
        supervisor=supervisor,
        interval=options.interval,
        scratch=options.scratch,
        world=world,
        artifacts=options.artifacts,
        numerics=key,
    )
    run = StageSequence(
        attempt, job.config, job.stages, job.dataset, world.device, record, key, began
    )
    with _leaving(world):
        run.go()
    return EXIT_FINISHED


@contextlib.contextmanager
def _leaving(world: World) -> Iterator[None]:
    """Where all ranks end alike the others wait for rank 0: torchrun ends all when one has."""
    try:
        yield
    except InterruptedRunError:
        world.close()
        raise
    world.close()


def say_ended(store: Store, head: Head) -> int:
    """Say that a run has ended already; return the exit code."""
    if head.state == "finished":
        print(f"[ok] {store.uri} is finished: weights {head.weights_sha256}", flush=True)
        return EXIT_FINISHED
    print(f"[failed] {store.uri} has failed: {head.reason}; begin a new run id", flush=True)
    return EXIT_FAILED


@contextlib.contextmanager
def _ending(attempt: Attempt) -> Iterator[None]:
    """Leave nothing behind, however the attempt ends: the lease released, the metrics flushed."""
    try:
        yield
    except RunFailedError as error:
        attempt.metrics.flush()
        attempt.events.emit("failed", "failed", message=str(error))
        attempt.lease.fail(str(error))
        raise
    finally:
        attempt.supervisor.last_resort.stand_down()
        # What ends the attempt is more telling than a release that did not work either.
        with contextlib.suppress(LeaseLostError, StoreError):
            attempt.lease.release()
        with contextlib.suppress(StoreError):
            attempt.metrics.flush()
        if attempt.lease.head.state == "released":
            attempt.events.emit("released", "ok", generation=attempt.generation)
        attempt.lease.close()
        attempt.metrics.close()


def _take_lease(options: Options, supervisor: Supervisor) -> Lease | Head:
    def waiting(writer: str) -> None:
        print(
            f"[lease] held by {writer}; taking over when it stands still for "
            f"{options.lease_ttl_seconds:g} s",
            flush=True,
        )

    def wait(seconds: float) -> bool:
        supervisor.watchdog.beat()
        return supervisor.interruption.wait(seconds)

    return acquire(
        options.store, options.run_id, options.writer, options.lease_ttl_seconds, wait, waiting
    )
