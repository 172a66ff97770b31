"""One attempt of a run: take the lease, resume, go through the stages, finish.

It ends in one of five ways, which are the exit codes: finished, failed, interrupted and saved,
lease lost, or refused because of a user's mistake.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from training.attempt.context import AttemptContext
from training.attempt.launch import OtherRanks, interpreters
from training.attempt.notice import InterruptedRunError
from training.attempt.supervisor import Supervisor
from training.attempt.world import RankEnvironment, World
from training.code_fingerprint import code_fingerprint
from training.engine.divergence import Retries
from training.engine.job import Job, RunOptions, run_dataset
from training.engine.numerics import configure, numerics_key
from training.engine.stages import StageSequence
from training.errors import EXIT_FAILED, EXIT_FINISHED, RankLostError, RunFailedError
from training.record.events import Events, SilentEvents
from training.record.head import Head
from training.record.lease import Lease, LeaseLostError
from training.record.metrics import Metrics, SilentMetrics
from training.record.reopen import with_way_back
from training.record.run_config import RunConfig, ensure_run_config
from training.registry import module_of
from training.report.meter import Meter
from training.report.profiler import StepProfiler
from training.report.receipt import conclude
from training.store.local_dataset import LocalDataset
from training.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)

# The rooms of training/ whose code decides about the weights.
_ROOMS = ("artifacts", "attempt", "engine", "save", "workloads/expansion")
# A connection breaks a moment before its process has ended.
_RANK_SECONDS = 1.0


def run_attempt(options: RunOptions, job: Job, supervisor: Supervisor) -> int:
    """Train until the run or this attempt ends; return the exit code of a run that has ended."""
    began = time.monotonic()
    with (
        run_dataset(options, job.workload, supervisor.watchdog) as dataset,
        _start_ranks(options, supervisor) as environment,
    ):
        config = job.config
        device = configure(
            num_threads=config.num_threads,
            deterministic=config.deterministic,
            local_rank=environment.local_rank,
        )
        key = numerics_key(
            device,
            world=environment.world_size,
            deterministic=config.deterministic,
            stages=job.numerics,
            code=code_fingerprint(module_of(options.workload), *_ROOMS),
        )
        if environment.rank > 0:
            world = World(environment, device)
            return _follow(options, job, dataset, supervisor, world, key)
        run_config = ensure_run_config(
            options.store, job.run_config(options, dataset, key), job.workload.placement_fields
        )
        lease = supervisor.take_lease(
            options.store, options.run_id, options.writer, options.lease_ttl_seconds
        )
        world = World(environment, device)
        if isinstance(lease, Head):
            return world.share((_report_ended(options.store, lease), run_config))[0]
        supervisor.last_resort.hold(lease)
        supervisor.extra_time.hold(options.store, lease)
        world.share((None, run_config))
        context = _leading_context(options, supervisor, lease, world, key, began)
        return _lead(
            context, run_config, lambda: _train(options, context, job, dataset, run_config)
        )


@contextlib.contextmanager
def _start_ranks(options: RunOptions, supervisor: Supervisor) -> Iterator[RankEnvironment]:
    """This process's rank; on a machine with several GPUs it becomes rank 0 and starts the rest."""
    environment = options.environment
    num_processes = environment.ranks(options.num_processes)
    if environment.world_size > 1 or num_processes == 1:
        yield environment
        return
    options.scratch.mkdir(parents=True, exist_ok=True)
    meeting = options.scratch / f"rendezvous-{secrets.token_hex(4)}"
    start = options.start_rank or interpreters(options.arguments, options.scratch)
    siblings = OtherRanks(start, num_processes, meeting)
    supervisor.last_resort.lead(siblings.show_stacks)
    siblings.watch(supervisor.last_resort.fail)
    try:
        yield replace(environment, world_size=num_processes, rendezvous=meeting.absolute().as_uri())
    except RuntimeError as error:
        # The error of a collective names a connection; the rank behind it is more telling.
        is_collective = type(error) is RuntimeError or isinstance(error, dist.DistError)
        lost = siblings.lost(_RANK_SECONDS) if is_collective else None
        if lost is None:
            raise
        raise RankLostError(f"{lost}; the next attempt resumes from the last commit") from error
    finally:
        supervisor.last_resort.stand_down()
        siblings.close()
        meeting.unlink(missing_ok=True)


def _leading_context(
    options: RunOptions,
    supervisor: Supervisor,
    lease: Lease,
    world: World,
    key: Mapping[str, Any],
    began: float,
) -> AttemptContext:
    """The context of rank 0, which alone writes what happens to the run."""
    generation = lease.head.generation
    profiler = None
    if options.profile_steps is not None:
        profiler = StepProfiler(options.profile_steps, options.store, generation, options.scratch)
    context = AttemptContext(
        store=options.store,
        own_lease=lease,
        metrics=Metrics(options.store, generation, lease.head.nonce, options.metrics_file),
        events=Events(options.store, options.writer),
        supervisor=supervisor,
        interval=options.interval,
        retention=options.retention,
        scratch=options.scratch,
        world=world,
        artifacts=options.artifacts,
        numerics=key,
        keeps_compiled=options.keep_compiled,
        meter=Meter(usd_per_hour=options.usd_per_hour, began=began),
        profiler=profiler,
    )
    context.tell_take_over()
    return context


def _train(
    options: RunOptions,
    context: AttemptContext,
    job: Job,
    dataset: LocalDataset,
    run_config: RunConfig,
) -> None:
    """Go through the stages, and again from the last commit where training diverges."""
    retries = Retries(context, num_retries=options.nan_retries, num_skips=options.nan_skips)
    retries.train(lambda: StageSequence(context, job, dataset, run_config).run())


def _lead(context: AttemptContext, run_config: RunConfig, train: Callable[[], None]) -> int:
    """Rank 0: train, and leave nothing behind however that ends."""
    try:
        with _leaving(context.world), _ending(context):
            context.lease.start_heartbeat()
            train()
    finally:
        if context.profiler is not None:
            context.profiler.close()
        conclude(context.store, run_config, context.lease.head)
    return EXIT_FINISHED


def _follow(
    options: RunOptions,
    job: Job,
    dataset: LocalDataset,
    supervisor: Supervisor,
    world: World,
    key: Mapping[str, Any],
) -> int:
    """A rank above 0: trains along, and writes nothing but its shards of derived data."""
    supervisor.last_resort.follow()
    supervisor.extra_time.follow()
    # Rank 0 may be at work on its own for long, and its watchdog is for all.
    supervisor.watchdog.close()
    code, run_config = world.share((None, None))
    if code is not None:
        return code
    assert run_config is not None
    context = AttemptContext(
        store=options.store,
        own_lease=None,
        metrics=SilentMetrics(),
        events=SilentEvents(),
        supervisor=supervisor,
        interval=options.interval,
        scratch=options.scratch,
        world=world,
        artifacts=options.artifacts,
        numerics=key,
        keeps_compiled=options.keep_compiled,
    )
    with _leaving(world):
        _train(options, context, job, dataset, run_config)
    return EXIT_FINISHED


@contextlib.contextmanager
def _leaving(world: World) -> Iterator[None]:
    """Where all ranks end alike, the others wait for rank 0: torchrun ends all when one has."""
    try:
        yield
    except InterruptedRunError:
        world.close()
        raise
    world.close()


def _report_ended(store: Store, head: Head) -> int:
    """Print that a run has ended already; return the exit code."""
    if head.state == "finished":
        _log.info("[ok] %s is finished: weights %s", store.uri, head.weights_sha256)
        return EXIT_FINISHED
    _log.error("[failed] %s has failed: %s", store.uri, head.reason)
    return EXIT_FAILED


@contextlib.contextmanager
def _ending(context: AttemptContext) -> Iterator[None]:
    """Release the lease and flush the metrics, however the attempt ends."""
    try:
        yield
    except RunFailedError as error:
        context.metrics.flush()
        reason = with_way_back(str(error), context.store.uri)
        context.events.emit("failed", "failed", message=reason)
        context.lease.fail(reason)
        _log.error("[failed] the run has failed: %s", reason)
        raise
    finally:
        context.supervisor.last_resort.stand_down()
        # What ends the attempt is more telling than a release that did not work either.
        with contextlib.suppress(LeaseLostError, StoreError):
            context.lease.release()
        with contextlib.suppress(StoreError):
            context.metrics.flush()
        if context.lease.head.state == "released":
            context.events.emit("released", "ok", generation=context.generation)
        context.lease.close()
        context.metrics.close()
