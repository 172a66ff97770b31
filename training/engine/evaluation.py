"""One evaluation of a stage: batches split by rank, parts gathered in order, summarized once."""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from training.attempt.context import AttemptContext
from training.engine.batches import MicroBatch, to_device
from training.engine.learner import Learner
from training.engine.loader import Loader
from training.engine.optimizer import autocast
from training.engine.parallel import Parallel
from training.engine.stage_checks import checked_metrics, checked_partial, samples_of
from training.randomness import seed_torch
from training.report.page import EVALUATION
from training.workload import Batch, Inputs, Partial, Samples, Train, implements

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
    """The metrics of split "validation"; raises between two batches if the attempt must stop.

    What an evaluation leaves for people is published under evaluation/; after the last one the
    stage shows what it has learned.
    """
    world = context.world
    samples = samples_of(stage, inputs, "validation")
    batches = in_order(samples, stage.settings.eval_batch)
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
                    seed_torch(
                        inputs.device, "evaluate", inputs.seed, stage.name, mine[turn].number
                    )
                    with torch.no_grad(), autocast(stage.settings.precision, inputs.device):
                        part = model.use(partial(_evaluated, stage, batch))
                    if mine[turn].counts:
                        parts.append(part)
            ordered = _of_all_ranks(context, parts)
            out = _empty_folder(context, name)
            metrics = _summarized(context, stage, ordered, out)
            if is_last and (context.world.leads or learner.is_sharded):
                _show(stage, inputs, model, ordered, out)
    finally:
        loader.close()
    if context.world.leads:
        _keep_files(context, name, out)
    return context.world.share(metrics)


def _evaluated(stage: Train, batch: Batch, model: nn.Module) -> Partial:
    return checked_partial(stage, stage.evaluate(model, batch))


def in_order(samples: Samples, size: int) -> list[MicroBatch]:
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
    """Where this rank's files for people go; only rank 0's are kept."""
    out = context.scratch / "evaluation" / f"rank-{context.world.rank}" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


def _summarized(
    context: AttemptContext, stage: Train, parts: Sequence[Partial], out: Path
) -> dict[str, float]:
    if not context.world.leads or not parts:
        return {}
    return checked_metrics(stage, stage.summarize(parts, out))


def _show(
    stage: Train, inputs: Inputs, model: Parallel, parts: Sequence[Partial], out: Path
) -> None:
    if not implements(stage, Train.show):
        return
    seed_torch(inputs.device, "show", inputs.seed, stage.name)
    with torch.no_grad(), autocast(stage.settings.precision, inputs.device):
        model.use(lambda own: stage.show(own, inputs, parts, out))


def _keep_files(context: AttemptContext, name: str, out: Path) -> None:
    """Copy tables and pictures into the run, for its report."""
    paths = [path for path in sorted(out.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in paths)
    if size > _MOST_FILE_BYTES:
        _log.warning("[%s] the evaluation's files, %.0f MB, are not kept", name, size / 1e6)
        return
    for path in paths:
        key = f"{EVALUATION}{name}/{path.relative_to(out).as_posix()}"
        context.store.put_file(key, path)
