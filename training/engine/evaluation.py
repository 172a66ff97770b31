"""Evaluation of a stage in its run, and of a finished run's weights (`evaluate`, `predict`).

Batches are split by rank, parts gathered in order and summarized once. A finished run is not
written to: derived data is read from it if it trained on the same dataset, and otherwise made in
the scratch folder.
"""

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from contract.errors import UserError
from contract.keys import EVALUATION, artifact_prefix
from training.artifacts.prepare import INDEX, make_shard, open_artifact
from training.durable import (
    AttemptContext,
    CheckpointContent,
    LocalDataset,
    OpenRun,
    ProgressBar,
    RunFailedError,
    StoreError,
    Weights,
)
from training.engine.batches import MicroBatch, to_device
from training.engine.job import ResolvedWorkload
from training.engine.learner import Learner
from training.engine.loader import Loader
from training.engine.optimizer import OPTIMIZER, autocast, state_by_name
from training.engine.parallel import Parallel
from training.engine.stage_checks import checked_metrics, checked_partial, samples_of
from training.numerics import configure, seed_torch
from training.registry import refuse_foreign
from training.workload import Batch, Inputs, Partial, Prepare, Prior, Samples, Train, implements

_log = logging.getLogger(__name__)

# An epoch number that no training sample is augmented with.
_EPOCH = -1
_MOST_FILE_BYTES = 20_000_000


def evaluate(
    context: AttemptContext,
    stage: Train,
    inputs: Inputs,
    learner: Learner,
    name: str,
    *,
    is_last: bool,
) -> dict[str, float]:
    """Return the metrics of split "validation"; raise between batches if the attempt must stop.

    Files for people are published under evaluation/; after the last evaluation the stage shows
    what it has learned.
    """
    world = context.world
    samples = samples_of(stage, inputs, "validation")
    if len(samples) < 1:
        if not stage.settings.needs_validation:
            return {}
        raise RunFailedError(f"stage {stage.name!r} has no validation samples; add some")
    batches = _in_order(samples, stage.settings.eval_batch)
    mine = batches[world.rank :: world.size]
    turns = len(batches[:: world.size])
    if learner.is_sharded and len(mine) < turns:
        # All ranks gather the parameters together, so all evaluate; this batch does not count.
        mine.append(replace(batches[0], counts=False))
    loader = Loader.of_stage(samples, mine, stage.settings, inputs)
    parts: list[Partial] = []
    try:
        with learner.evaluating() as model:
            for turn in range(turns):
                context.consensus.stop_if_due(may_use_extra_time=True)
                if turn < len(mine):
                    batch = to_device(loader.next(), inputs.device)
                    number = mine[turn].number
                    seed_torch(inputs.device, "evaluate", inputs.seed, stage.name, number)
                    with torch.no_grad(), autocast(stage.settings.precision, inputs.device):
                        part = model.use(partial(_evaluated, stage, batch))
                    if mine[turn].counts:
                        parts.append(part)
            ordered = _of_all_ranks(context, parts)
            out = _empty_folder(context, name)
            metrics: dict[str, float] = {}
            if world.leads and ordered:
                metrics = checked_metrics(stage, stage.summarize(ordered, out))
            if is_last and (context.world.leads or learner.is_sharded):
                _show(stage, inputs, model, ordered, out)
    finally:
        loader.close()
    if context.world.leads:
        _keep_files(context, name, out)
    shutil.rmtree(out, ignore_errors=True)  # a run may evaluate a thousand times
    return context.world.share(metrics)


def _evaluated(stage: Train, batch: Batch, model: nn.Module) -> Partial:
    return checked_partial(stage, stage.evaluate(model, batch))


def _in_order(samples: Samples, size: int) -> list[MicroBatch]:
    """Every sample once, in batches of `size`, as evaluations see them."""
    all_ids = range(len(samples))
    return [
        MicroBatch(number=first, epoch=_EPOCH, ids=all_ids[first : first + size])
        for first in range(0, len(all_ids), size)
    ]


def _of_all_ranks(context: AttemptContext, parts: Sequence[Partial]) -> list[Partial]:
    """The parts of all ranks, in the order of a single rank."""
    if context.world.size == 1:
        return list(parts)
    sent = [
        Partial(sums=part.sums, tensors={name: t.cpu() for name, t in part.tensors.items()})
        for part in parts
    ]
    by_rank = context.world.gather(sent)
    turns = len(by_rank[0])
    return [of_rank[turn] for turn in range(turns) for of_rank in by_rank if turn < len(of_rank)]


def _empty_folder(context: AttemptContext, name: str) -> Path:
    """Make an empty folder for this rank's files for people; only rank 0's are kept."""
    out = context.scratch / "evaluation" / f"rank-{context.world.rank}" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


def _show(
    stage: Train, inputs: Inputs, model: Parallel, parts: Sequence[Partial], out: Path
) -> None:
    if not implements(stage, Train.show):
        return
    seed_torch(inputs.device, "show", inputs.seed, stage.name)
    # Compile nothing here: each length of a growing text would get code of its own.
    is_loaded = "torch._dynamo" in sys.modules
    uncompiled = torch.compiler.set_stance("force_eager") if is_loaded else contextlib.nullcontext()
    with uncompiled, torch.no_grad(), autocast(stage.settings.precision, inputs.device):
        model.use(lambda own: stage.show(own, inputs, parts, out))


def _keep_files(context: AttemptContext, name: str, out: Path) -> None:
    """Copy tables and pictures into the run, for its report."""
    paths = [path for path in sorted(out.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in paths)
    if size > _MOST_FILE_BYTES:
        _log.warning("[%s] the evaluation's files, %.0f MB, are not kept", name, size / 1e6)
        return
    try:
        for path in paths:
            key = f"{EVALUATION}{name}/{path.relative_to(out).as_posix()}"
            context.store.put_file(key, path)
    except StoreError as error:  # only people look at them: training goes on
        _log.warning("[%s] the evaluation's files are not kept: %s", name, error)


_Shards = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStage:
    """A Train stage of a run, with its trained model in eval mode."""

    stage: Train
    inputs: Inputs
    model: nn.Module

    def each_batch(self, split: str) -> Iterator[tuple[MicroBatch, Batch]]:
        """Yield every sample of a split once, in order, as the run's own evaluations see them."""
        settings, device = self.stage.settings, self.inputs.device
        samples = samples_of(self.stage, self.inputs, split)
        batches = _in_order(samples, settings.eval_batch)
        loader = Loader.of_stage(samples, batches, settings, self.inputs)
        try:
            with ProgressBar(f"{self.stage.name}, {split}", len(samples)) as bar:
                for micro in batches:
                    batch = to_device(loader.next(), device)
                    seed_torch(device, "evaluate", self.inputs.seed, self.stage.name, micro.number)
                    with torch.no_grad(), autocast(settings.precision, device):
                        yield micro, batch
                    bar.show(micro.number + len(micro.ids), "samples")
        finally:
            loader.close()

    def evaluate(self, split: str, out: Path) -> dict[str, float]:
        """Compute the metrics of a split; files for people go to `out`."""
        parts: list[Partial] = [
            checked_partial(self.stage, self.stage.evaluate(self.model, batch))
            for _, batch in self.each_batch(split)
        ]
        if not parts:
            raise UserError(f"split {split!r} of the dataset has no samples; name another")
        out.mkdir(parents=True, exist_ok=True)
        return checked_metrics(self.stage, self.stage.summarize(parts, out))


def load_trained(
    run: OpenRun,
    resolved: ResolvedWorkload,
    weights: Weights,
    dataset: LocalDataset,
    scratch: Path,
    stage_name: str,
) -> TrainedStage:
    """Build the stage `stage_name` of a run over a dataset, and load the weights into its model."""
    config, given = resolved.config, run.record.workload
    refuse_foreign(given, resolved.workload, dataset.manifest, str(dataset.folder))
    device = configure(num_threads=config.num_threads, deterministic=config.deterministic)
    names = [stage.name for stage in resolved.stages if isinstance(stage, Train)]
    if stage_name not in names:
        raise UserError(
            f"the run has no Train stage {stage_name!r}; pass one of {', '.join(names)}"
        )
    shards: dict[str, _Shards] = {}
    prior: Prior | None = None
    for stage in resolved.stages:
        inputs = Inputs(
            config=config,
            dataset=dataset,
            artifact=shards.__getitem__,
            prior=prior,
            device=device,
            rank=0,
            world=1,
            seed=config.seed,
            scratch=scratch,
        )
        if isinstance(stage, Prepare):
            shards[stage.name] = _derived(run, stage, inputs)
        elif stage.name == stage_name:
            seed_torch(device, "model", config.seed, stage.name)
            model = stage.model(inputs)
            stage.numerics(model, inputs, {})
            weights.load_into(model, stage.name)
            return TrainedStage(stage=stage, inputs=inputs, model=model.to(device).eval())
        else:
            prior = _prior(run, stage.name) or prior
    raise AssertionError(stage_name)


def _derived(run: OpenRun, stage: Prepare, inputs: Inputs) -> _Shards:
    """Return the shards of a Prepare stage: the run's own, or new ones for another dataset."""
    key = stage.key(inputs)
    if run.store.get(artifact_prefix(key) + INDEX) is not None:
        return open_artifact(run.store, key, inputs.scratch / "artifacts")
    folder, shards = inputs.scratch / "derived" / key, []
    with ProgressBar(stage.name, stage.num_shards) as bar:
        for shard in range(stage.num_shards):
            shards.append(load_file(make_shard(stage, inputs, folder, shard)))
            bar.show(shard + 1, "shards")
    return shards


def _prior(run: OpenRun, stage: str) -> Prior | None:
    """The committed result of a stage, if the run still has it."""
    end = run.head.end_of(stage)
    if end is None:
        return None
    snapshot = CheckpointContent.read_weights(run.store, end)
    return Prior(
        stage=stage,
        step=end.step,
        model=snapshot.weights,
        metrics=snapshot.state["position"]["results"][stage],
        optimizer=lambda: state_by_name(CheckpointContent.read(run.store, end, {OPTIMIZER})),
    )
