"""The stage `detect`: DINO on images in COCO's format, from random or from ImageNet's weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from training.errors import UserError
from training.workload import Batch, Inputs, Loss, Milestones, Partial, Settings, Start, Train
from training.workloads.detection import evaluation, samples
from training.workloads.detection.attention import Implementation, choose, why_not_triton
from training.workloads.detection.augment import Augmentation
from training.workloads.detection.config import DetectionConfig
from training.workloads.detection.denoising import denoising
from training.workloads.detection.detector import (
    Detections,
    Detector,
    parameter_groups,
    postprocess,
)
from training.workloads.detection.losses import (
    Match,
    criterion,
    hungarian,
    in_order,
    missing_packages,
)
from training.workloads.detection.pictures import draw_pictures
from training.workloads.detection.published import load_backbone
from training.workloads.detection.samples import DetectionSamples, detection_samples

_ATTENTION = "attention"  # in the numerics key
_PARTS = ("classes", "boxes", "giou", "encoder", "denoising")
# Objects of an image in the batches that are measured: with fewer there are as many queries of
# denoising, with more their one group grows.
_MEASURED_OBJECTS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainDetector(Train):
    """The only stage of every recipe."""

    config: DetectionConfig
    name: str = "detect"

    @property
    def settings(self) -> Settings:
        """As published: constant, a tenth from the last epochs on, gradients clipped."""
        c = self.config
        drops = c.drop_epoch < c.epochs
        return replace(
            c.settings,
            schedule=Milestones(factor=0.1, epochs=(c.drop_epoch,)) if drops else "constant",
        )

    def model(self, i: Inputs) -> Detector:
        # What `numerics` then chooses keeps no more than this for backward.
        return Detector(self.config.architecture, "deterministic")

    def numerics(
        self, m: nn.Module, i: Inputs, started_with: Mapping[str, str]
    ) -> Mapping[str, str]:
        """What computes the attention: as the recipe says, or what is fastest on this machine."""
        c = self.config
        chosen: str = c.attention
        dtype = getattr(torch, c.settings.precision)
        if chosen == "auto":
            before = started_with.get(_ATTENTION)
            chosen = choose(i.device, dtype, c.deterministic, before, max_side=c.max_side)
        elif chosen == "triton" and (reason := why_not_triton(i.device, dtype)):
            raise UserError(
                f"attention is 'triton', which does not work here ({reason}); give another, or "
                "--override attention=auto"
            )
        elif chosen == "reference" and c.deterministic and i.device.type == "cuda":
            raise UserError(
                f"attention is {chosen!r}, whose backward torch refuses on a GPU where "
                "deterministic is true; give --override attention=auto, or deterministic=false"
            )
        cast(Detector, m).attend_by(cast(Implementation, chosen))
        return {_ATTENTION: chosen}

    def refusals(self, meta: Mapping[str, Any]) -> Sequence[str]:
        """Other classes than the model's, or more objects in an image than it has queries."""
        return samples.refusals(meta, self.config.num_classes, self.config.num_queries)

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the data; fetch ImageNet's weights, unless others are given."""
        c = self.config
        failures = [
            *evaluation.missing_packages(),
            *missing_packages(),
            *samples.failures(i, c.num_classes, c.num_queries),
        ]
        if not failures and c.weights == "pretrained" and not i.is_given_weights:
            load_backbone(cast(Detector, m))
        facts = {"parameters": sum(p.numel() for p in m.parameters())}
        return Start(failures=failures, facts=facts)

    def optimizer(self, m: nn.Module) -> Optimizer:
        """AdamW; what has learned before learns slower."""
        c = self.config
        groups = parameter_groups(m, c.learning_rate, c.backbone_learning_rate)
        # Not False, which would rule out torch's foreach as well.
        return AdamW(groups, weight_decay=c.weight_decay, fused=c.fused_optimizer or None)

    def samples(self, i: Inputs, split: str) -> DetectionSamples:
        c = self.config
        augmentation = Augmentation(
            scales=c.sides,
            longest_side=c.max_side,
            flip=c.flip_share,
            crop=c.crop_share,
            eval_scale=max(c.sides),
        )
        return detection_samples(i, split, augmentation, c.pad_to)

    def weight(self, b: Batch) -> float:
        """The number of objects."""
        return float((b["labels"] >= 0).sum())

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        return self._loss(m, b, hungarian)

    def surrogate(self, m: nn.Module, b: Batch) -> Loss:
        """The loss if the first queries were to predict the objects: nothing is read from data."""
        return self._loss(m, b, in_order)

    def _loss(self, m: nn.Module, b: Batch, match: Match) -> Loss:
        c = self.config
        labels_BN, boxes_BN4 = b["labels"], b["boxes"]
        noise = denoising(labels_BN, boxes_BN4, c.architecture) if c.denoising_queries else None
        predictions = m(b["images"], b["sizes"], noise)
        found = criterion(predictions, labels_BN, boxes_BN4, match)
        # Of objects, as the loss itself is.
        count = float(labels_BN.numel()) if match is in_order else self.weight(b)
        parts = {f"{part}_loss": (getattr(found, part), count) for part in _PARTS}
        return Loss(total=found.total, metrics=parts)

    def example(self, size: int) -> Batch:
        """Of the largest images: one lies on its side, another stands, and both are padded."""
        c = self.config
        height = max(c.sides) if size == 1 else c.max_side
        return self._batch(size, height, c.max_side)

    def usual(self, size: int) -> Batch:
        """Of images of 4:3 with the middle one of the shorter sides."""
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

    def _found(self, m: nn.Module, b: Batch) -> Detections:
        evaluation.refuse_other_classes(b, self.config.num_classes)
        return postprocess(m(b["images"], b["sizes"]), b["original_sizes"], self.config.num_select)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        found = self._found(m, b)
        return evaluation.partial(found.scores_BN, found.labels_BN, found.boxes_BN4, b)

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """The detections of each image."""
        found = self._found(m, b)
        return evaluation.predictions(found.scores_BN, found.labels_BN, found.boxes_BN4, b)

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        return evaluation.summarize(parts, out)

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Pictures of what is found beside what is there."""
        draw_pictures(parts, out)

    def result_list(self, prediction: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """An image's part of a COCO results file."""
        return evaluation.result_list(prediction)
