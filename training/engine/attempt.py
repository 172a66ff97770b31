"""The training in one attempt of a workload: ranks, stages, and retries after a divergence.

Rank 0 holds the run (training/durable/attempt/attempt.py); the others follow it.
"""

import contextlib
import gc
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from contract.errors import Exit, UserError
from contract.source import source_sha256
from training.durable import (
    AttemptContext,
    Divergence,
    GoBackError,
    HeldRun,
    LocalDataset,
    RunConfig,
    RunFailedError,
    RunResult,
    StepProfiler,
    Supervisor,
    World,
    opened_dataset,
    run_attempt,
)
from training.engine.job import ResolvedWorkload, RunOptions
from training.engine.stages import StageSequence
from training.numerics import code_fingerprint, configure, numerics_key
from training.registry import facts_of, module_of
from training.settings import recorded

_log = logging.getLogger(__name__)

# The rooms of training/ whose code affects the weights.
_ROOMS = ("artifacts", "durable/attempt", "durable/save", "engine", "workloads/expansion")


def run_workload(options: RunOptions, resolved: ResolvedWorkload, supervisor: Supervisor) -> int:
    """Train until the run or this attempt ends; return the exit code of a run that has ended."""
    with (
        opened_dataset(options.dataset_uri, options.scratch, supervisor.watchdog) as dataset,
        options.environment.meeting(
            supervisor,
            options.num_processes,
            options.scratch,
            {"dataset": dataset.fingerprint, "run": options.store.uri},
            arguments=options.arguments,
            start=options.start_rank,
        ) as environment,
    ):
        _refuse_other_workload(options, resolved, dataset)
        config = resolved.config
        device = configure(
            num_threads=config.num_threads,
            deterministic=config.deterministic,
            local_rank=environment.local_rank,
        )
        key = numerics_key(
            device,
            world=environment.world_size if resolved.depends_on_ranks else None,
            deterministic=config.deterministic,
            stages=resolved.numerics,
            code=code_fingerprint(module_of(options.workload), *_ROOMS),
        )
        if options.source:
            # The code fingerprint covers one of its modules; a shared shard may depend on any.
            key["source"] = source_sha256(options.source)
        world = World(environment, device)
        job = _WorkloadJob(options, resolved, dataset, world, key)
        if world.leads:
            _log_beginning(options, resolved, dataset, device)
        with world.leaving(), contextlib.closing(job):
            return job.lead(supervisor) if world.leads else job.follow(supervisor)


def _log_beginning(
    options: RunOptions, resolved: ResolvedWorkload, dataset: LocalDataset, device: torch.device
) -> None:
    """Log torch, data and config, for whoever watches the machine from far away."""
    overrides = {**resolved.fitted, **options.overrides}
    named = "".join(f" {name}={text}" for name, text in sorted(overrides.items()))
    _log.info("[ok] torch %s on %s", torch.__version__, device)
    _log.info("[ok] dataset %s: %s", dataset.manifest["name"], facts_of(dataset.meta))
    _log.info("[ok] %s, recipe %s:%s", resolved.workload.name, options.recipe, named or " as it is")


def _refuse_other_workload(
    options: RunOptions, resolved: ResolvedWorkload, dataset: LocalDataset
) -> None:
    made_for, asked = dataset.manifest["workload"], resolved.workload.name
    if made_for != asked:
        raise UserError(
            f"the dataset {options.dataset_uri} was made for workload {made_for!r}, "
            f"not {asked!r}; use a dataset of this workload"
        )


class _WorkloadJob:
    """The stages of a workload, trained by all ranks of an attempt."""

    def __init__(
        self,
        options: RunOptions,
        resolved: ResolvedWorkload,
        dataset: LocalDataset,
        world: World,
        key: Mapping[str, Any],
    ) -> None:
        self.placement = resolved.workload.placement_fields
        self.ranks: int | None = world.size
        self._options = options
        self._resolved = resolved
        self._dataset = dataset
        self._world = world
        self._key = key
        self._has_begun = False
        self._profiler: StepProfiler | None = None

    def run_config(self) -> RunConfig:
        """Return what config.json says of the run, if this is its first attempt."""
        options, origin = self._options, self._resolved.origin
        source = {"source_sha256": self._key["source"]} if options.source else {}
        return options.run_config(
            workload=options.workload,
            recipe=options.recipe,
            overrides=dict(options.overrides),
            fitted=dict(self._resolved.fitted),
            config={**recorded(self._resolved.config), **source},
            dataset=self._dataset.fingerprint,
            numerics_key=self._key,
            origin=asdict(origin) if origin else None,
        )

    def lead(self, supervisor: Supervisor) -> int:
        """Rank 0: hold the run and train; return the exit code of a run that has ended."""
        code = run_attempt(self._options, self, supervisor)
        if not self._has_begun:  # the run had already ended: the other ranks end too
            self._world.share((code, None))
        return code

    def train(self, run: HeldRun) -> RunResult:
        """Rank 0: train the stages, from the newest valid checkpoint to the end."""
        options, self._has_begun = self._options, True
        self._world.share((None, run.record))
        if options.profile_steps is not None:
            self._profiler = StepProfiler(
                options.profile_steps, options.store, run.generation, options.scratch
            )
        result = self._train(self._context(run.supervisor, run), run.record, run)
        assert result is not None
        return result

    def follow(self, supervisor: Supervisor) -> int:
        """Ranks above 0: train along, and write nothing but shards of derived data."""
        supervisor.follow()
        code, record = self._world.share((None, None))
        if code is not None:
            return code
        assert record is not None
        self._train(self._context(supervisor, None), record, None)
        return Exit.FINISHED

    def close(self) -> None:
        """Store the trace of the steps, if one was asked for."""
        if self._profiler is not None:
            self._profiler.close()

    def _context(self, supervisor: Supervisor, run: HeldRun | None) -> AttemptContext:
        """Return the stages' view of the attempt; only rank 0 records what happens to the run."""
        options = self._options
        return AttemptContext(
            store=options.store,
            **(run.of_rank_0 if run else {}),
            supervisor=supervisor,
            interval=options.interval,
            retention=options.retention,
            scratch=options.scratch,
            world=self._world,
            artifacts=options.artifacts,
            numerics=self._key,
            usd_per_hour=options.usd_per_hour,
            profiler=self._profiler,
        )

    def _train(
        self, context: AttemptContext, record: RunConfig, run: HeldRun | None
    ) -> RunResult | None:
        """Go through the stages, and again from the last commit where training diverges.

        The retry is the next generation of the run, in the same process, and resumes as a
        replacement machine would: from the newest valid checkpoint, building everything again. Only
        a step that diverges again and again, with no progress past it, fails the run. Rank 0
        counts; the other ranks hold no run.
        """
        furthest_step, count, num_retries = 0, 0, self._options.nan_retries
        while True:
            try:
                return StageSequence(context, self._resolved, self._dataset, record).run()
            except GoBackError as error:
                divergence = error.divergence
            # The error and its traceback are gone by now; collecting cycles frees the old model.
            context.supervisor.last_resort.staged_copy = None
            gc.collect()
            if run is None:
                if not context.world.share_flag(False):
                    raise RunFailedError("training diverged; rank 0 says where")
                continue
            assert divergence is not None, "rank 0 reads what every rank reads"
            count = count + 1 if divergence.step <= furthest_step else 1
            furthest_step = max(furthest_step, divergence.step)
            context.world.share_flag(count <= num_retries)
            if count > num_retries:
                raise RunFailedError(_in_vain(divergence, num_retries))
            self._begin_generation(run, divergence, count)

    def _begin_generation(self, run: HeldRun, divergence: Divergence, retry: int) -> None:
        """Go back to the last commit, and skip the step that diverged if that is allowed."""
        skipped = run.lease.head.skipped_steps
        is_skipped = len(skipped) < self._options.nan_skips and divergence.step not in skipped
        if is_skipped:
            skipped = tuple(sorted((*skipped, divergence.step)))
        _log.warning(
            "[diverged] %s; retry %d of %d from the last commit%s",
            divergence.message,
            retry,
            self._options.nan_retries,
            f", without step {divergence.step}" if is_skipped else "",
        )
        run.events.emit(
            "diverged",
            step=divergence.step,
            message=divergence.message,
            loss=_text(divergence.loss),
            gradient_norm=_text(divergence.gradient_norm),
            retry=retry,
            is_skipped=is_skipped,
        )
        run.begin_generation(skipped)


def _in_vain(divergence: Divergence, num_retries: int) -> str:
    tried = f"{num_retries} retries from the last commit got no further; " if num_retries else ""
    return (
        f"{divergence.message}; nothing was published; {tried}lower the learning rate, clip the "
        "gradients, or leave such steps out (--nan-skips)"
    )


def _text(value: float | None) -> str | None:
    """Return a number as text, since JSON has no NaN or infinity."""
    return None if value is None else str(value)
