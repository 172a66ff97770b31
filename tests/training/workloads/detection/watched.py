"""The detection workload in small, which can be interrupted at any step, on plans mostly empty."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from tests.training.tiny import reached
from training.cli.main import main
from training.durable.store.local_dataset import LocalDataset
from training.engine.job import TrainProxy, WorkloadProxy
from training.settings import changed
from training.workload import Batch, Loss, Partial, Prepare, Train
from training.workloads.detection.config import DetectionConfig, laptop
from training.workloads.detection.detection_dataset import _annotations_file
from training.workloads.detection.detection_workload import _Detection

# Seconds of imports, once for all that tests fork.
for _slow in ("faster_coco_eval", "scipy.optimize", "torchvision.models"):
    importlib.import_module(_slow)

WORKLOAD = "--workload=tests.training.workloads.detection.watched:WATCHED"


def small() -> DetectionConfig:
    """Two micro-batches of one image each; every image has another shape."""
    return changed(
        laptop(),
        num_threads=1,
        width=32,
        num_heads=2,
        num_levels=3,
        encoder_layers=1,
        decoder_layers=2,
        feed_forward=64,
        num_queries=20,
        denoising_queries=10,
        short_sides="64,72,80",
        max_side=96,
        pad_to=1,
        num_select=20,
        epochs=2,
        drop_epoch=2,
        global_batch=2,
        micro_batch=1,
    )


class Watched(TrainProxy):
    """The stage, which says where it is; the machines of the tests call it `first`."""

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        reached("first", step)
        found = super().loss(m, b, step, num_steps)
        height, width = b["images"].shape[-2:]
        shape = {"objects": (self.weight(b), 1.0), "shape": (height * 1000.0 + width, 1.0)}
        return replace(found, metrics={**found.metrics, **shape})

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        reached("first-evaluation", 0)
        return super().evaluate(m, b)


class WatchedDetection(WorkloadProxy):
    """The workload with this stage and one recipe."""

    recipes = MappingProxyType({"quick": small})

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [Watched(stage) for stage in self._inner.stages(c)]


WATCHED = WatchedDetection(_Detection())


def make_sparse_dataset(out: Path) -> Path:
    """Floor plans of which every other one has lost its objects."""
    assert main(["data", "make", "--workload=detection", f"--out={out}", "--count=20"]) == 0
    for split in ("train", "validation"):
        path = out / _annotations_file(split)
        content = json.loads(path.read_text())
        kept = {image["id"] for image in content["images"][::2]}
        found = [each for each in content["annotations"] if each["image_id"] in kept]
        path.write_text(json.dumps(content | {"annotations": found}))
    meta = json.loads((out / "manifest.json").read_text())["meta"]
    LocalDataset.complete(out, "detection", meta)
    return out
