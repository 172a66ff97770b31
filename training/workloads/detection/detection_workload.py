"""The detection workload: DINO, which finds objects, on data in COCO's format.

python -m training data make --workload detection --out data --count 1200
python -m training run --workload detection --recipe laptop --dataset-uri data --run-uri runs/first
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from contract.errors import UserError
from training import (
    Batch,
    Inputs,
    Loss,
    Milestones,
    Progress,
    Rung,
    Settings,
    Start,
    Workload,
    autocast_rungs,
    micro_batch_rungs,
    offered_rung,
    rung,
)
from training.durable import DataReport
from training.workloads.detection.attention import Implementation, choose, why_not_triton
from training.workloads.detection.check import check
from training.workloads.detection.config import DetectionConfig, coco_12, full, laptop
from training.workloads.detection.detection_dataset import import_folder, make_dataset, open_split
from training.workloads.detection.detector import Detector, denoising, parameter_groups
from training.workloads.detection.evaluation import DetectionEvaluation, missing_package
from training.workloads.detection.losses import Match, criterion, hungarian, in_order
from training.workloads.detection.published import load_backbone
from training.workloads.detection.samples import DetectionSamples

_ATTENTION = "attention"  # in the numerics key
_PARTS = ("classes", "boxes", "giou", "encoder", "denoising")
# Objects per image in measured batches: fewer would not change the number of denoising queries;
# more would enlarge their single group.
_MEASURED_OBJECTS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainDetector(DetectionEvaluation):
    """The only stage of every recipe."""

    config: DetectionConfig
    name: str = "detect"

    @property
    def settings(self) -> Settings:
        """The published schedule: constant, then a tenth for the last epochs."""
        c = self.config
        drops = c.drop_epoch < c.epochs
        return replace(
            c.settings,
            schedule=Milestones(factor=0.1, epochs=(c.drop_epoch,)) if drops else "constant",
        )

    def model(self, i: Inputs) -> Detector:
        # `numerics` may later choose another, which saves no more than this for backward.
        return Detector(self.config.architecture, "deterministic")

    def numerics(
        self, m: nn.Module, i: Inputs, started_with: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Choose how attention is computed: as the recipe says, or the fastest on this machine."""
        c = self.config
        chosen: str = c.attention
        dtype = getattr(torch, c.settings.precision)
        if chosen == "auto":
            before = started_with.get(_ATTENTION)
            chosen = choose(i.device, dtype, before, max_side=c.max_side)
        elif chosen == "triton" and (reason := why_not_triton(i.device, dtype)):
            raise UserError(
                f"attention is 'triton', which does not work here ({reason}); use another, or "
                "--override attention=auto"
            )
        elif chosen == "reference" and c.deterministic and i.device.type == "cuda":
            raise UserError(
                f"attention is {chosen!r}, whose backward torch refuses on a GPU where "
                "deterministic is true; pass --override attention=auto, or deterministic=false"
            )
        cast(Detector, m).attend_by(cast(Implementation, chosen))
        return {_ATTENTION: chosen}

    def refusals(self, meta: Mapping[str, Any]) -> Sequence[str]:
        """Refuse classes other than the model's, and more objects per image than it has queries."""
        num_classes, num_queries, found = self.config.num_classes, self.config.num_queries, []
        names = list(meta.get("classes", ()))
        if names and num_classes != len(names):
            found.append(
                f"the model has {num_classes} classes, but the dataset has {len(names)} "
                f"({', '.join(names[:10])}{', ...' if len(names) > 10 else ''}); "
                f"pass --override num_classes={len(names)}"
            )
        most = int(meta.get("most_objects", 0))
        if most > num_queries:
            found.append(
                f"the model has {num_queries} queries, but an image has {most} objects, and it can "
                f"find only one per query; pass --override num_queries={most}, or more"
            )
        return found

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the data; fetch ImageNet's weights, unless others were passed."""
        c = self.config
        # Faults in validation must be found before the first epoch, not after it.
        split, _ = (open_split(i.dataset, name) for name in ("train", "validation"))
        names = [category.name for category in split.categories]
        # From the annotations themselves, whatever the manifest says.
        there = {"classes": names, "most_objects": split.objects_per_image.max()}
        failures = [
            *missing_package("faster-coco-eval", "the evaluation"),
            *missing_package("scipy", "matching predictions to objects"),
            *self.refusals(there),
        ]
        if not failures and c.weights == "pretrained" and not i.is_given_weights:
            load_backbone(cast(Detector, m))
        facts = {"parameters": sum(p.numel() for p in m.parameters())}
        return Start(failures=failures, facts=facts)

    def optimizer(self, m: nn.Module) -> Optimizer:
        """Return AdamW with a lower learning rate for the pretrained backbone."""
        c = self.config
        groups = parameter_groups(m, c.learning_rate, c.backbone_learning_rate)
        # None, because False would also rule out torch's foreach.
        return AdamW(groups, weight_decay=c.weight_decay, fused=c.fused_optimizer or None)

    def samples(self, i: Inputs, split: str) -> DetectionSamples:
        return DetectionSamples(
            split=open_split(i.dataset, split),
            dataset=i.dataset,
            augmentation=self.augmentation,
            bucket=self.config.pad_to,
        )

    def weight(self, b: Batch) -> float:
        """Return the number of objects."""
        return float((b["labels"] >= 0).sum())

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        return self._loss(m, b, hungarian)

    def surrogate(self, m: nn.Module, b: Batch) -> Loss:
        """Return the loss with objects matched to the first queries, independent of the data."""
        return self._loss(m, b, in_order)

    def _loss(self, m: nn.Module, b: Batch, match: Match) -> Loss:
        c = self.config
        labels_BN, boxes_BN4 = b["labels"], b["boxes"]
        noise = denoising(labels_BN, boxes_BN4, c.architecture) if c.denoising_queries else None
        predictions = m(b["images"], b["sizes"], noise)
        found = criterion(predictions, labels_BN, boxes_BN4, match)
        # Averaged over objects, like the loss itself.
        count = float(labels_BN.numel()) if match is in_order else self.weight(b)
        parts = {f"{part}_loss": (getattr(found, part), count) for part in _PARTS}
        return Loss(total=found.total, metrics=parts)

    def example(self, size: int) -> Batch:
        """Return a batch as padded for the largest images: one landscape, another portrait."""
        c = self.config
        height = max(c.sides) if size == 1 else c.max_side
        return self._batch(size, height, c.max_side)

    def usual(self, size: int) -> Batch:
        """Return a batch of 4:3 images with the median of the shorter sides."""
        c = self.config
        side = sorted(c.sides)[len(c.sides) // 2]
        return self._batch(size, side, min(c.max_side, side * 4 // 3))

    def _batch(self, size: int, height: int, width: int) -> Batch:
        to = self.config.pad_to
        height, width = (-(-side // to) * to for side in (height, width))
        return {
            "images": torch.zeros(size, 3, height, width, dtype=torch.uint8),
            "sizes": torch.tensor([[height, width]]).expand(size, -1).contiguous(),
            "labels": torch.zeros(size, _MEASURED_OBJECTS, dtype=torch.long),
            "boxes": torch.full((size, _MEASURED_OBJECTS, 4), 0.5),
            "image_ids": torch.zeros(size, dtype=torch.long),
            "original_sizes": torch.tensor([[height, width]]).expand(size, -1).contiguous(),
        }


_MAX_SIDES = (1066, 800)
_FEWER_NOISED = 50
_NUM_QUERIES = (300, 200)
_WIDTH = 192


def _offered(c: DetectionConfig) -> Sequence[Rung]:
    # No shorter side may exceed the longest side.
    sides = [side for side in _MAX_SIDES if max(c.sides) <= side < c.max_side]
    queries = [number for number in _NUM_QUERIES if number < c.num_queries]
    return [
        *(offered_rung(max_side=side) for side in sides),
        *([offered_rung(denoising_queries=_FEWER_NOISED)] * (c.denoising_queries > _FEWER_NOISED)),
        *(offered_rung(num_queries=number) for number in queries),
        *([offered_rung(width=_WIDTH)] * (c.width > _WIDTH)),
    ]


RECIPES: Mapping[str, Callable[[], DetectionConfig]] = MappingProxyType(
    {"laptop": laptop, "full": full, "coco_12": coco_12}
)
# 1,200 generated floor plans; CubiCasa5K with walls and rooms; COCO 2017.
_NOMINAL_SAMPLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "laptop": {"train": 900, "validation": 180},
        "full": {"train": 2_935, "validation": 400},
        "coco_12": {"train": 118_287, "validation": 5_000},
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Detection(Workload[DetectionConfig]):
    """The workload that the registry imports; its stage is defined in the other files here."""

    name: str = "detection"
    recipes = RECIPES
    nominal_samples = _NOMINAL_SAMPLES

    def stages(self, c: DetectionConfig) -> Sequence[TrainDetector]:
        return (TrainDetector(config=c),)

    def fitted(self, c: DetectionConfig, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """Set the dataset's number of classes, and a query for each object of the fullest image."""
        classes = len(meta.get("classes", ())) or c.num_classes
        most = int(meta.get("most_objects", 0))
        return {
            **({"num_classes": str(classes)} if classes != c.num_classes else {}),
            **({"num_queries": str(most)} if most > c.num_queries else {}),
        }

    def rungs(self, c: DetectionConfig) -> Sequence[Rung]:
        """Return the ladder; smaller micro-batches accumulate, with the same count of objects."""
        recomputed = rung("activations of the encoder recomputed", recompute_encoder=True)
        again = [recomputed] * (not c.recompute_encoder)
        return [*again, *micro_batch_rungs(c), *autocast_rungs(c), *_offered(c)]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress)

    def import_folder(
        self, folder: Path, out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return import_folder(folder, out, seed, progress)

    def check_data(self, folder: Path, progress: Progress) -> DataReport:
        return check(folder, progress).report


DETECTION = _Detection()
