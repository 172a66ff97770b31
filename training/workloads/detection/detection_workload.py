"""The detection workload: DINO, which finds objects, on data in COCO's format.

python -m training data make --workload detection --out data --count 1200
python -m training run --workload detection --recipe laptop --dataset-uri data --run-uri runs/first

The detector's loss: focal, L1 and generalized IoU, of every layer, summed over the objects.

The cheapest assignment, found on the CPU, decides which query predicts which object. The engine
divides by the number of objects, because it knows those of all micro-batches and ranks. S sets of
predictions (each decoder layer's, then the encoder's), B images, T images of all sets, Q queries, N
objects of the image with most, C classes, L layers, G groups, K denoising queries.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
from training.workloads.detection.decoder import giou
from training.workloads.detection.detection_dataset import import_folder, make_dataset, open_split
from training.workloads.detection.detector import (
    Detector,
    Predictions,
    denoising,
    denoising_targets,
    parameter_groups,
)
from training.workloads.detection.evaluation import DetectionEvaluation, missing_package
from training.workloads.detection.published import load_backbone
from training.workloads.detection.samples import DetectionSamples

# Maps costs (T, Q, N) and labels (B, N), -1 for no object, to objects' queries (T, N), Q for none.
# T is a multiple of B: several layers' predictions of the same images.
Match: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# The weights of the parts of the loss, and of the matching costs, as published.
_CLASSES, _BOXES, _GIOU = 1.0, 5.0, 2.0
_CLASS_COST, _BOX_COST, _GIOU_COST = 2.0, 5.0, 2.0
# The focal loss (arXiv:1708.02002): the share of the objects' class, and the focus.
_ALPHA, _GAMMA = 0.25, 2.0


@torch.no_grad()
def _costs(logits_TQC: Tensor, boxes_TQ4: Tensor, labels_TN: Tensor, boxes_TN4: Tensor) -> Tensor:
    """Return the costs of queries for predicting objects, (T, Q, N): class, distance, overlap."""
    chance_TQC = logits_TQC.sigmoid()
    yes_TQC = -_ALPHA * (1 - chance_TQC) ** _GAMMA * (chance_TQC + 1e-8).log()
    no_TQC = (1 - _ALPHA) * chance_TQC**_GAMMA * (1 - chance_TQC + 1e-8).log()
    label_TQN = labels_TN.clamp(min=0)[:, None].expand(-1, logits_TQC.shape[1], -1)
    class_TQN = (yes_TQC + no_TQC).gather(2, label_TQN)
    boxes_TQ14, boxes_T1N4 = boxes_TQ4[:, :, None], boxes_TN4[:, None]
    away_TQN = (boxes_TQ14 - boxes_T1N4).abs().sum(dim=-1)
    overlap_TQN = giou(boxes_TQ14, boxes_T1N4)
    return _CLASS_COST * class_TQN + _BOX_COST * away_TQN - _GIOU_COST * overlap_TQN


def hungarian(costs_TQN: Tensor, labels_BN: Tensor) -> Tensor:
    """Return the assignment with the lowest total cost."""
    # Importing it takes a third of a second, which only training needs to spend.
    from scipy.optimize import linear_sum_assignment

    # NaN must end in a loss of NaN, not in an error of the solver.
    matrices = np.nan_to_num(costs_TQN.cpu().numpy(), nan=1e9, posinf=1e9, neginf=-1e9)
    num_queries = matrices.shape[1]
    queries_TN = np.full((len(matrices), matrices.shape[2]), num_queries, dtype=np.int64)
    objects = [np.flatnonzero(row >= 0) for row in labels_BN.cpu().numpy()]
    for number, matrix in enumerate(matrices):
        of_image = objects[number % len(objects)]
        queries, places = linear_sum_assignment(matrix[:, of_image])
        queries_TN[number, of_image[places]] = queries
    return torch.from_numpy(queries_TN).to(costs_TQN.device)


def in_order(costs_TQN: Tensor, labels_BN: Tensor) -> Tensor:
    """Match objects to the first queries whatever the cost: only shapes matter to a measurement."""
    num_images, num_queries, num_objects = costs_TQN.shape
    queries_N = torch.arange(num_objects, device=costs_TQN.device).clamp(max=num_queries)
    return queries_N.expand(num_images, -1)


class _Losses(NamedTuple):
    """The training loss and, for the log, its weighted parts; all are sums over objects."""

    total: Tensor
    classes: Tensor  # of the last layer
    boxes: Tensor
    giou: Tensor
    encoder: Tensor
    denoising: Tensor  # of all layers


def criterion(
    predictions: Predictions, labels_BN: Tensor, boxes_BN4: Tensor, match: Match = hungarian
) -> _Losses:
    """Match each layer's predictions with the objects (label -1: none); sum the losses."""
    p = predictions
    boxes_SBQ4 = torch.cat([p.boxes_LBQ4, p.encoder_boxes_BQ4[None]])
    # Under autocast, logits have fewer bits than boxes.
    logits_SBQC = torch.cat([p.logits_LBQC, p.encoder_logits_BQC[None]]).to(boxes_SBQ4.dtype)
    queries_SBN = _matched(logits_SBQC, boxes_SBQ4, labels_BN, boxes_BN4, match)
    num_queries, is_matched_SBN = logits_SBQC.shape[2], queries_SBN < logits_SBQC.shape[2]
    # One more place than there are queries, for the objects without one.
    targets_SBQ = labels_BN.new_full((*logits_SBQC.shape[:2], num_queries + 1), -1)
    targets_SBQ.scatter_(2, queries_SBN, labels_BN.expand(queries_SBN.shape))
    found_SBN4 = _taken(boxes_SBQ4, queries_SBN.clamp(max=num_queries - 1))
    sums_3S = _weighted_sums(
        logits_SBQC,
        targets_SBQ[..., :-1],
        found_SBN4,
        boxes_BN4.expand(found_SBN4.shape),
        is_matched_SBN,
    )
    denoising = _denoising(p, labels_BN, boxes_BN4)
    classes, boxes, overlap = sums_3S[:, -2].detach()
    return _Losses(
        total=sums_3S.sum() + denoising,
        classes=classes,
        boxes=boxes,
        giou=overlap,
        encoder=sums_3S[:, -1].sum().detach(),
        denoising=denoising.detach(),
    )


def _weighted_sums(
    logits_SBQC: Tensor,
    targets_SBQ: Tensor,
    found_SBN4: Tensor,
    true_SBN4: Tensor,
    counts_SBN: Tensor,
) -> Tensor:
    """Return the losses of classes, boxes and overlaps, (3, S); boxes only where `counts_SBN`."""
    classes_SBQC = _focal(logits_SBQC, targets_SBQ)
    away_SBN = (found_SBN4 - true_SBN4).abs().sum(dim=-1)
    apart_SBN = 1 - giou(found_SBN4, true_SBN4)
    boxes_S, apart_S = (
        torch.where(counts_SBN, each_SBN, 0).sum(dim=(1, 2)) for each_SBN in (away_SBN, apart_SBN)
    )
    classes_S = classes_SBQC.sum(dim=(1, 2, 3))
    return torch.stack([_CLASSES * classes_S, _BOXES * boxes_S, _GIOU * apart_S])


def _focal(logits_C: Tensor, targets: Tensor) -> Tensor:
    """Compute each class's own focal loss (arXiv:1708.02002); a target of -1 means no class."""
    classes = torch.arange(logits_C.shape[-1], device=logits_C.device)
    is_class_C = targets[..., None] == classes
    entropy_C = F.binary_cross_entropy_with_logits(
        logits_C, is_class_C.to(logits_C.dtype), reduction="none"
    )
    chance_C = logits_C.sigmoid()
    wrong_C = torch.where(is_class_C, 1 - chance_C, chance_C)
    share_C = torch.where(is_class_C, _ALPHA, 1 - _ALPHA)
    return share_C * wrong_C**_GAMMA * entropy_C


def _matched(
    logits_SBQC: Tensor, boxes_SBQ4: Tensor, labels_BN: Tensor, boxes_BN4: Tensor, match: Match
) -> Tensor:
    """Return each object's query, (S, B, N)."""
    num_sets = len(logits_SBQC)
    costs_TQN = _costs(
        logits_SBQC.flatten(0, 1),
        boxes_SBQ4.flatten(0, 1),
        labels_BN.repeat(num_sets, 1),
        boxes_BN4.repeat(num_sets, 1, 1),
    )
    return match(costs_TQN, labels_BN).view(num_sets, *labels_BN.shape)


def _taken(boxes_SBQ4: Tensor, queries_SBN: Tensor) -> Tensor:
    """Return these queries' boxes, by indexing, whose backward always has the same bits."""
    num_sets, num_images = boxes_SBQ4.shape[:2]
    set_S11 = torch.arange(num_sets, device=boxes_SBQ4.device)[:, None, None]
    image_B1 = torch.arange(num_images, device=boxes_SBQ4.device)[:, None]
    return boxes_SBQ4[set_S11, image_B1, queries_SBN]


def _denoising(p: Predictions, labels_BN: Tensor, boxes_BN4: Tensor) -> Tensor:
    """Return the denoising queries' loss, averaged over groups; they need no matching."""
    boxes_LBK4 = p.denoising_boxes_LBK4
    logits_LBKC = p.denoising_logits_LBKC.to(boxes_LBK4.dtype)
    num_groups = logits_LBKC.shape[2] // max(1, 2 * labels_BN.shape[1])
    if not num_groups:
        # Zero, but not a constant, so that every parameter has a gradient.
        return logits_LBKC.sum() + boxes_LBK4.sum()
    targets_BG2N = denoising_targets(labels_BN, num_groups)
    num_layers = len(logits_LBKC)
    true_LBK4 = (
        boxes_BN4[:, None].expand(-1, 2 * num_groups, -1, -1).flatten(1, 2).expand(boxes_LBK4.shape)
    )
    targets_LBK = targets_BG2N.flatten(1).expand(num_layers, -1, -1)
    sums_3L = _weighted_sums(logits_LBKC, targets_LBK, boxes_LBK4, true_LBK4, targets_LBK >= 0)
    return sums_3L.sum() / num_groups


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
        return Detector(self.config, "deterministic")

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

    def companions(
        self, meta: Mapping[str, Any], read: Callable[[str], bytes]
    ) -> Mapping[str, bytes]:
        """Return the sides of an evaluated image; the model normalizes its pixels itself."""
        c = self.config
        steps = {"pixels": "RGB, 0 to 255", "shorter_side": max(c.sides), "most": c.max_side}
        return {"preprocessing.json": json.dumps(steps).encode()}

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

    def first_files(self) -> int:
        """Return the images of a step: each has a file of its own."""
        return self.settings.global_batch

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
        noise = denoising(labels_BN, boxes_BN4, c) if c.denoising_queries else None
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Detection(Workload[DetectionConfig]):
    """The workload that the registry imports; its stage is defined in the other files here."""

    name: str = "detection"
    recipes = RECIPES
    # 1,200 generated floor plans; CubiCasa5K with walls and rooms; COCO 2017.
    nominal_samples = MappingProxyType(
        {
            "laptop": {"train": 900, "validation": 180},
            "full": {"train": 2_935, "validation": 400},
            "coco_12": {"train": 118_287, "validation": 5_000},
        }
    )

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
