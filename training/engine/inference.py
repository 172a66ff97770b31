"""Inference with a run's trained stages, for `evaluate` and `predict`. Writes nothing to the run.

Derived data of the same dataset is taken from the run; for another dataset it is made again in the
scratch folder.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from contract.keys import artifact_prefix
from training.artifacts.prepare import INDEX, make_shard, open_artifact
from training.config import resolve_config
from training.engine.batches import MicroBatch, to_device
from training.engine.evaluation import in_order
from training.engine.loader import Loader
from training.engine.numerics import configure
from training.engine.optimizer import OPTIMIZER, autocast, state_by_name
from training.engine.stage_checks import checked_metrics, checked_partial, samples_of
from training.errors import UserError
from training.randomness import seed_torch
from training.record.run import OpenRun
from training.registry import load_workload
from training.report.progress import ProgressBar
from training.save.resume import WEIGHTS, read_checkpoint
from training.save.weights import Weights, load_weights
from training.store.local_dataset import LocalDataset
from training.workload import Batch, Inputs, Partial, Prepare, Prior, Train

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
        batches = in_order(samples, settings.eval_batch)
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
    run: OpenRun, weights: Weights, dataset: LocalDataset, scratch: Path, stage_name: str
) -> TrainedStage:
    """Build the stage `stage_name` of a run over a dataset, and load the weights into its model."""
    record = run.record
    workload = load_workload(record.workload)
    if dataset.manifest["workload"] != workload.name:
        raise UserError(
            f"the dataset {dataset.folder} was made for workload "
            f"{dataset.manifest['workload']!r}, but the run trained {workload.name!r}; "
            "give a dataset of that workload"
        )
    config = resolve_config(workload, record.recipe, record.all_overrides)
    device = configure(num_threads=config.num_threads, deterministic=config.deterministic)
    stages = workload.stages(config)
    names = [stage.name for stage in stages if isinstance(stage, Train)]
    if stage_name not in names:
        raise UserError(
            f"the run has no Train stage {stage_name!r}; give one of {', '.join(names)}"
        )
    artifacts = _Artifacts(run, scratch)
    prior: Prior | None = None
    for stage in stages:
        inputs = Inputs(
            config=config,
            dataset=dataset,
            artifact=artifacts.shards,
            prior=prior,
            device=device,
            rank=0,
            world=1,
            seed=config.seed,
            scratch=scratch,
        )
        if isinstance(stage, Prepare):
            artifacts.add(stage, inputs)
        elif stage.name == stage_name:
            model = stage.model(inputs)
            stage.numerics(model, inputs, {})
            load_weights(model, weights, stage.name)
            return TrainedStage(stage=stage, inputs=inputs, model=model.to(device).eval())
        else:
            prior = _prior(run, stage.name) or prior
    raise AssertionError(stage_name)


class _Artifacts:
    """The shards of Prepare stages: the run's own, or made here for another dataset."""

    def __init__(self, run: OpenRun, scratch: Path) -> None:
        self._run = run
        self._scratch = scratch
        self._shards: dict[str, _Shards] = {}

    def shards(self, name: str) -> _Shards:
        return self._shards[name]

    def add(self, stage: Prepare, inputs: Inputs) -> None:
        key = stage.key(inputs)
        if self._run.store.get(artifact_prefix(key) + INDEX) is not None:
            self._shards[stage.name] = open_artifact(
                self._run.store, key, self._scratch / "artifacts"
            )
            return
        folder = self._scratch / "derived" / key
        shards = []
        with ProgressBar(stage.name, stage.num_shards) as bar:
            for shard in range(stage.num_shards):
                shards.append(load_file(make_shard(stage, inputs, folder, shard)))
                bar.show(shard + 1, "shards")
        self._shards[stage.name] = shards


def _prior(run: OpenRun, stage: str) -> Prior | None:
    """The committed result of a stage, if the run still has it."""
    ends = [e for e in run.head.checkpoints if e.stage == stage and e.kind == "stage-end"]
    if not ends:
        return None
    snapshot = read_checkpoint(run.store, ends[-1], WEIGHTS)
    metrics: Mapping[str, Any] = snapshot.state["position"]["results"][stage]
    model = {**snapshot.tensors["model"], **snapshot.tensors.get("ema", {})}
    return Prior(
        stage=stage,
        step=ends[-1].step,
        model=model,
        metrics=metrics,
        optimizer=lambda: state_by_name(read_checkpoint(run.store, ends[-1], {OPTIMIZER})),
    )
