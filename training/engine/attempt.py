"""The training in one attempt of a workload: ranks, stages, and retries after a divergence.

Rank 0 holds the run (training/durable/attempt/attempt.py); the others follow it.

The stages of a run in order: resume, prepare, train, finish.
"""

import contextlib
import gc
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contract.errors import Exit
from contract.source import source_sha256
from training.artifacts.prepare import ensure_artifact, open_artifact
from training.durable import (
    AttemptContext,
    CheckpointContent,
    CheckpointEntry,
    Checkpointer,
    DamagedCheckpointError,
    Divergence,
    GoBackError,
    HeldRun,
    InterruptedRunError,
    LocalDataset,
    Position,
    Resume,
    RunConfig,
    RunFailedError,
    RunResult,
    ShardedContent,
    StepProfiler,
    Store,
    StoreError,
    Supervisor,
    World,
    export_final,
    opened_dataset,
    run_attempt,
)
from training.engine.job import ResolvedWorkload, RunOptions
from training.engine.loop import StageLoop
from training.engine.optimizer import OPTIMIZER, state_by_name
from training.engine.parallel import is_sharded
from training.engine.step_log import longest, sentence
from training.numerics import ENGINE, code_fingerprint, configure, numerics_key
from training.registry import facts_of, module_of, refuse_foreign
from training.settings import recorded
from training.workload import Inputs, OptimizerState, Prepare, Prior, PriorTensors, Train

_log = logging.getLogger(__name__)


def run_workload(options: RunOptions, resolved: ResolvedWorkload, supervisor: Supervisor) -> int:
    """Train until the run or this attempt ends; return the exit code of a run that has ended."""
    code = {"code": code_fingerprint(module_of(options.workload), *ENGINE)}
    if options.source:
        # The code fingerprint covers one of its modules; a shared shard may depend on any.
        code["source"] = source_sha256(options.source)
    with (
        opened_dataset(options.dataset_uri, options.scratch, supervisor.watchdog) as dataset,
        options.environment.meeting(
            supervisor,
            options.num_processes,
            options.scratch,
            {"run": options.store.uri, **_decisive(resolved, dataset), **code},
            arguments=options.arguments,
            start=options.start_rank,
        ) as environment,
    ):
        refuse_foreign(options.workload, resolved.workload, dataset.manifest, options.dataset_uri)
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
        )
        world = World(environment, device)
        job = _WorkloadJob(options, resolved, dataset, world, {**key, **code})
        if world.leads:
            _log_beginning(options, resolved, dataset, device)
        with world.leaving(), contextlib.closing(job):
            return job.lead(supervisor) if world.leads else job.follow(supervisor)


def _decisive(resolved: ResolvedWorkload, dataset: LocalDataset) -> dict[str, Any]:
    """Return what all hosts must have alike, as each trains with its own."""
    apart = resolved.workload.placement_fields | {"loader_workers"}
    config = {n: value for n, value in recorded(resolved.config).items() if n not in apart}
    given = {"dataset": dataset.fingerprint, "origin": resolved.origin and asdict(resolved.origin)}
    return {**given, **{f"config field {name}": config[name] for name in config}}


def _log_beginning(
    options: RunOptions, resolved: ResolvedWorkload, dataset: LocalDataset, device: torch.device
) -> None:
    """Log torch, data and config, for whoever watches the machine from far away."""
    overrides = {**resolved.fitted, **options.overrides}
    named = "".join(f" {name}={text}" for name, text in sorted(overrides.items()))
    _log.info("[ok] torch %s on %s", torch.__version__, device)
    facts = facts_of(dataset.meta) or f"{len(dataset.manifest['files'])} files"
    _log.info("[ok] dataset %s: %s", dataset.manifest["name"], facts)
    _log.info("[ok] %s, recipe %s:%s", resolved.workload.name, options.recipe, named or " as it is")


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
        try:
            code = run_attempt(self._options, self, supervisor)
        except InterruptedRunError:
            if not self._has_begun:  # while it waited for the lease, and the others for it
                self._world.share((Exit.INTERRUPTED, None))
            raise
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
            planned_life_seconds=options.planned_life_seconds,
            planned_evaluations=options.planned_evaluations,
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
            context.supervisor.last_resort.forget_staged()
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


class StageSequence:
    """Goes through the stages of a run, from its newest valid checkpoint."""

    def __init__(
        self,
        context: AttemptContext,
        resolved: ResolvedWorkload,
        dataset: LocalDataset,
        run_config: RunConfig,
    ) -> None:
        self._context = context
        self._store = context.supervisor.hearing(context.store)
        self._config = resolved.config
        self._stages = resolved.stages
        self._dataset = dataset
        self._run_config = run_config
        self._artifacts: dict[str, str] = {}
        self._opened: dict[str, Sequence[Mapping[str, Tensor]]] = {}
        self._skipped_steps: tuple[int, ...] = ()
        # An end, read to resume.
        self._verified: tuple[CheckpointEntry, CheckpointContent] | None = None
        # Until the stage that resumes from it has it.
        self._snapshot: CheckpointContent | ShardedContent | None = None

    def run(self) -> RunResult | None:
        """Resume from the newest valid checkpoint and train to the end; rank 0 has the result."""
        context = self._context
        if not context.world.leads:
            self._skipped_steps = context.world.share(())
            self._snapshot = Resume(context).follow()
            self._train(None, self._shared(None))
            return None
        self._skipped_steps = context.world.share(context.lease.head.skipped_steps)
        position = self._resume()
        context.lease.sweep()
        state = self._snapshot.state if self._snapshot else {}
        checkpointer = Checkpointer(context, position, state)
        context.supervisor.last_resort.staged_copy = checkpointer
        with closing(checkpointer):
            position = self._train(checkpointer, self._shared(position))
        return self._result(position)

    def _shared(self, position: Position | None) -> Position | None:
        """Share the position and the snapshot that rank 0 has found."""
        position, self._snapshot = Resume(self._context).share(position, self._snapshot)
        return position

    def _train(self, checkpointer: Checkpointer | None, position: Position | None) -> Position:
        names = [stage.name for stage in self._stages]
        if position and (position.has_ended or position.stage not in names):
            self._snapshot = None  # no stage resumes from it
        ended = set(position.results) if position else set()
        self._artifacts = dict(position.artifacts) if position else {}
        for number, stage in enumerate(self._stages):
            if isinstance(stage, Prepare):
                self._prepare(stage, names, number, position)
                continue
            if ended.intersection(names[number:]):
                continue  # this stage, or one that was built on it, has ended
            self._context.consensus.stop_if_due()
            position = self._train_stage(checkpointer, stage, position)
        assert position is not None
        return position

    def _train_stage(
        self, checkpointer: Checkpointer | None, stage: Train, before: Position | None
    ) -> Position:
        """Train one stage from its start or from the snapshot, and keep nothing of it."""
        inputs = self._inputs(before)
        snapshot, self._snapshot = self._snapshot, None
        start = before if snapshot and before else self._begin(stage, before)
        assert start.stage == stage.name
        start = replace(start, artifacts=dict(self._artifacts))
        loop = StageLoop(
            *(self._context, checkpointer, stage, inputs, start, snapshot), self._skipped_steps
        )
        del snapshot  # the loop has what it needs of it
        return loop.run()

    def _prepare(
        self, stage: Prepare, names: Sequence[str], number: int, position: Position | None
    ) -> None:
        """Derive the data or verify what is there, from the results of the stages before."""
        if position and position.has_ended and position.stage == names[-1]:
            return  # only the end of the run is left to do
        self._context.consensus.stop_if_due()
        before = position
        if position:
            results = {n: r for n, r in position.results.items() if n in names[:number]}
            before = replace(position, results=results)
        self._artifacts[stage.name] = ensure_artifact(
            self._context, stage, lambda: self._inputs(before), self._artifacts.get(stage.name)
        )

    def _begin(self, stage: Train, before: Position | None) -> Position:
        if before is None:
            return Position(stage=stage.name, numerics_changed=self._changed(()))
        return Position(
            stage=stage.name,
            step=before.step,
            results=before.results,
            facts=before.facts,
            numerics=before.numerics,
            numerics_changed=before.numerics_changed,
            times=before.times,
        )

    def _resume(self) -> Position | None:
        context = self._context
        loaded, passed_over = Resume(context).find_newest(self._is_sharded, self._verify_beginning)
        position = Position.from_json(loaded.content.state["position"]) if loaded else None
        if position:
            changed = self._changed(position.numerics_changed)
            if added := sorted({*changed} - {*position.numerics_changed}):
                parts = ", ".join(added)
                _log.warning("[resume] results may differ: the run began with another %s", parts)
            position = replace(position, numerics_changed=changed)
        where: dict[str, Any] = {
            "step": position.step if position else 0,
            "stage": position.stage if position else None,
            "checkpoint": loaded.entry.name if loaded else None,
        }
        passed = [{"name": name, "why": why} for name, why in passed_over]
        if loaded:
            context.events.emit("resumed", "ok", **where, passed_over=passed)
            _log.info("[resume] from %s, step %d", where["checkpoint"], where["step"])
        key = context.numerics
        context.metrics.write("resume", **where, passed_over=passed, numerics_key=key)
        self._snapshot = loaded.content if loaded else None
        return position

    def _is_sharded(self, name: str) -> bool:
        return any(
            isinstance(stage, Train)
            and stage.name == name
            and is_sharded(stage.settings, self._context.world.size)
            for stage in self._stages
        )

    def _verify_beginning(self, position: Position) -> None:
        self._verified = self._read_end(position) if position.results else None

    def _changed(self, before: Sequence[str]) -> tuple[str, ...]:
        """The parts of the numerics key that some attempt has changed so far."""
        changed = self._run_config.changed_numerics(self._context.numerics)
        return tuple(sorted({*before, *changed}))

    def _inputs(self, position: Position | None) -> Inputs:
        return Inputs(
            config=self._config,
            dataset=self._dataset,
            artifact=self._artifact,
            prior=self._prior(position),
            device=self._context.world.device,
            rank=self._context.world.rank,
            world=self._context.world.size,
            seed=self._config.seed,
            scratch=self._context.scratch,
        )

    def _artifact(self, name: str) -> Sequence[Mapping[str, Tensor]]:
        if name not in self._artifacts:
            made = ", ".join(sorted(self._artifacts)) or "none"
            raise KeyError(f"no Prepare stage {name!r} was made before this stage; made: {made}")
        if name not in self._opened:
            cache = self._context.scratch / "artifacts"
            self._opened[name] = open_artifact(self._store, self._artifacts[name], cache)
        return self._opened[name]

    def _prior(self, position: Position | None) -> Prior | None:
        """The committed end of the last Train stage, read by rank 0 for all."""
        if position is None or not position.results:
            return None
        world, end, weights = self._context.world, None, None
        if world.leads:
            # From the store even if this process has just written it.
            with _explained():
                end, snapshot = self._read_end(position)
            weights = snapshot.weights
        end = world.share(end)
        assert end is not None
        return Prior(
            stage=end.stage,
            step=end.step,
            model=PriorTensors(world.share_tensors(weights)),
            metrics=position.results[end.stage],
            optimizer=partial(_read_optimizer, self._store, end),
        )

    def _read_end(self, position: Position) -> tuple[CheckpointEntry, CheckpointContent]:
        """The committed end of the last stage that has ended; reused if it was just verified."""
        end = self._end(position)
        verified, self._verified = self._verified, None
        if verified is not None and verified[0] == end:
            return verified
        try:
            return end, CheckpointContent.read_weights(self._store, end)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"the end of stage {end.stage!r}, {end.name}, is damaged: {error}"
            ) from error

    def _end(self, position: Position) -> CheckpointEntry:
        last = list(position.results)[-1]
        end = self._context.lease.head.end_of(last)
        if end is None:
            raise DamagedCheckpointError(f"the end of stage {last!r} is not in head.json")
        return end

    def _result(self, position: Position) -> RunResult:
        """Write the weights; a notice no longer interrupts from here on."""
        context, run_config = self._context, self._run_config
        context.supervisor.last_resort.stand_down()
        with _explained():
            end = self._end(position)
        about = {
            "run_id": run_config.run_id,
            "workload": run_config.workload,
            "recipe": run_config.recipe,
            "stage": end.stage,
            "step": str(end.step),
            "config": json.dumps(run_config.config),
            "metrics": json.dumps(dict(position.metrics)),
        }
        # A stale writer fails here, before it overwrites what its successor has left.
        context.lease.beat()
        with _explained():
            weights = export_final(self._store, end, about, context.scratch)
        chosen = {"chosen": dict(position.numerics)} if position.numerics else {}
        return RunResult(
            steps=position.step,
            weights_sha256=weights,
            stages=position.results,
            numerics_key={**context.numerics, **chosen},
            numerics_changed=self._changed(position.numerics_changed),
            facts={
                **({"facts": dict(position.facts)} if position.facts else {}),
                **_bottleneck(position, str(context.numerics["device"])),
                **_accuracies(position),
                "peak_gpu_bytes": _peak_gpu_bytes(context.world.device),
            },
        )


def _bottleneck(position: Position, device: str) -> dict[str, Any]:
    """Return the stages' times, and a sentence on what bound the stage that took the most."""
    found = longest(position.times)
    text = sentence(*found, device) if found else None
    if text is None:
        return {}
    _log.info("[bottleneck] %s", text)
    return {"bottleneck": text, "times": dict(position.times)}


def _accuracies(position: Position) -> dict[str, float]:
    """Return each stage's accuracy, and the last one's, under names of their own."""
    found = {
        f"{stage}_accuracy": metrics["accuracy"]
        for stage, metrics in position.results.items()
        if "accuracy" in metrics
    }
    if "accuracy" in position.metrics:
        found["validation_accuracy"] = position.metrics["accuracy"]
    return found


def _read_optimizer(store: Store, end: CheckpointEntry) -> OptimizerState:
    """Read the optimizer's state; each rank that asks for it reads it alone."""
    with _explained():
        return state_by_name(CheckpointContent.read(store, end, {OPTIMIZER}))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except DamagedCheckpointError as error:
        raise StoreError(f"{error}; the next attempt resumes from an older one") from error


def _peak_gpu_bytes(device: torch.device) -> int | None:
    """Peak bytes of this attempt's tensors, for `sizing plan --run`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
