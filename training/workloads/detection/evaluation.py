"""Average precision as COCO defines it, by class and size, from faster-coco-eval; and pictures.

The truth is part of the partial results, as annotated and with crowds, so any rank may evaluate any
image and the parts may come in any order.
B images, K detections of an image, M objects of all images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn.functional import pad

from contract.errors import UserError
from training import Captioned, Inputs, Partial, Train, write_sheet, write_table
from training.workloads.detection.coco import Category
from training.workloads.detection.config import DetectionConfig
from training.workloads.detection.detection_dataset import open_split
from training.workloads.detection.detector import Detections, postprocess
from training.workloads.detection.image_files import read_rgb, upright_size
from training.workloads.detection.samples import Augmentation, Batch, read, written

# AP, AP50 ... in the order of the stats of COCO's evaluation.
_STATS = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
_RECALL = 8  # index of the recall of up to 100 detections
_TRUTH = ("truth_images", "truth_labels", "truth_boxes", "truth_areas", "truth_crowds")
# The pictures that an evaluation keeps have at most this many pixels per side.
_SHOWN_PIXELS = 300
# Weaker detections are not drawn, because a detector always makes many of them.
_LEAST_SCORE = 0.3
_MOST_DRAWN = 100
# With more classes than colours, classes share them.
_COLORS = (
    *("blue", "darkorange", "green", "red", "purple"),
    *("brown", "magenta", "gray", "olive", "darkcyan"),
)


class DetectionEvaluation(Train):
    """Evaluation, prediction and pictures by the stage's trained detector."""

    config: DetectionConfig

    @property
    def augmentation(self) -> Augmentation:
        """The transformations of an image before the model sees it."""
        c = self.config
        return Augmentation(
            scales=c.sides,
            longest_side=c.max_side,
            flip=c.flip_share,
            crop=c.crop_share,
            eval_scale=max(c.sides),
        )

    def found(self, m: nn.Module, b: Batch) -> Detections:
        """Return each image's best detections; UserError if model and data differ in classes."""
        if (num := len(read(b["categories"]))) != (known := self.config.num_classes):
            raise UserError(
                f"the dataset has {num} classes, but the model tells {known} apart; evaluate on "
                "a dataset of the classes that it was trained on"
            )
        return postprocess(m(b["images"], b["sizes"]), b["original_sizes"], self.config.num_select)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Return a batch's detections, boxes as x, y, x, y in the original images, and truth."""
        found = self.found(m, b)
        tensors = {
            "image_ids": b["image_ids"],
            "scores": found.scores_BN.float(),
            "labels": found.labels_BN,
            "boxes": found.boxes_BN4.float(),
            "original_sizes": b["original_sizes"],
            "categories": b["categories"],
            **{name: b[name] for name in _TRUTH},
        }
        if len(b["shown"]):
            tensors |= _pictures(b)
        return Partial(tensors={name: tensor.cpu() for name, tensor in tensors.items()})

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """Return each image's id and detections, in the dataset's own ids, best first."""
        found, categories = self.found(m, b), read(b["categories"])
        columns = (
            b["image_ids"],
            found.scores_BN.float(),
            found.labels_BN,
            found.boxes_BN4.float(),
        )
        predicted = []
        for image_id, scores, labels, boxes in zip(*(c.tolist() for c in columns), strict=True):
            rows = sorted(zip(scores, labels, boxes, strict=True), key=lambda row: -row[0])
            detections = [
                {
                    "image_id": image_id,
                    "category_id": categories[label].id,
                    "bbox": [round(v, 3) for v in (x, y, right - x, bottom - y)],
                    "score": round(score, 6),
                }
                for score, label, (x, y, right, bottom) in rows
            ]
            predicted.append({"image_id": image_id, "detections": detections})
        return predicted

    def result_list(self, prediction: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return an image's part of a COCO results file."""
        detections: Sequence[Mapping[str, Any]] = prediction["detections"]
        return detections

    def draw(self, m: nn.Module, i: Inputs, images: Sequence[Path], out: Path) -> None:
        """Draw each image upright, with boxes, classes and scores, as a PNG of the same name."""
        categories = open_split(i.dataset, "validation").categories
        for path in images:
            size = upright_size(path)
            if size is None:
                raise UserError(f"{path} is not an image that Pillow can read; remove it")
            image, view = read_rgb(path, *size), self.augmentation.whole(*size)
            below, right = (-side % self.config.pad_to for side in (view.height, view.width))
            batch = {
                "images": pad(_as_tensor(view.of(image)), (0, right, 0, below))[None],
                "sizes": torch.tensor([[view.height, view.width]]),
                "original_sizes": torch.tensor([size]),
                "categories": written(categories),
            }
            found = self.found(m, {name: each.to(i.device) for name, each in batch.items()})
            columns = (each[0].tolist() for each in found)
            rows: _Rows = []
            for score, label, (x, y, end, bottom) in zip(*columns, strict=True):
                if score >= _LEAST_SCORE:
                    caption = f"{categories[label].name} {score:.2f}"
                    rows.append((label, (x, y, end - x, bottom - y), caption))
            drawn = _drawn(_as_tensor(image), rows, size)
            Image.fromarray(drawn).save(out / f"{path.name}.png")

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Return AP over all IoU thresholds, sizes and classes; write a table of classes to `out`.

        Unknown values, such as the AP of small objects where there are none, are left out.
        """
        detections = _DetectionsAndTruth.of(parts)
        if bool(detections.truth["crowds"].all()):
            raise ValueError(
                "the evaluated images have no objects, so their average precision is unknown; "
                "evaluate a split that has some"
            )
        stats, classes = _judged(detections)
        values = dict(zip(_STATS, stats[: len(_STATS)], strict=True))
        values["AR"] = stats[_RECALL]
        for row in classes:
            for kind in ("AP", "AP50"):
                name = f"{kind}_{row['class']}"
                values[f"{kind}_class_{row['class']}" if name in values else name] = row[kind]
        known = [
            [v if row["objects"] or not isinstance(v, float) else None for v in row.values()]
            for row in classes
        ]
        write_table(out / "classes.csv", list(classes[0]), known)
        return {name: float(value) for name, value in values.items() if value >= 0}

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Draw the first images: the truth on the left, the detections on the right."""
        pictures = [picture for part in parts for picture in _shown(part.tensors)]
        if not pictures:
            return
        detections = _DetectionsAndTruth.of(parts)
        drawn = []
        for image, image_id in pictures:
            size = detections.size(image_id)
            panels = [_drawn(image, rows, size) for rows in _panels(detections, image_id)]
            drawn.append(Captioned(np.concatenate(panels, axis=1)))
        classes = ", ".join(
            f"{category.name} {_color(label)}"
            for label, category in enumerate(detections.categories[: len(_COLORS)])
        )
        heading = f"truth | found with a score of at least {_LEAST_SCORE}: {classes}"
        write_sheet(out / "detections.jpg", heading, drawn, num_columns=2)


def missing_package(name: str, needed_by: str) -> list[str]:
    """Return why this machine lacks a package, if it does; asked before training starts."""
    if find_spec(name.replace("-", "_")) is not None:
        return []
    return [
        f"{needed_by} needs the package {name}, which is not installed; install it with "
        f"`pip install {name}`"
    ]


def _pictures(batch: Batch) -> dict[str, Tensor]:
    """Return the images to show, reduced in size, with their ids."""
    images, sizes = batch["images"][batch["shown"]], batch["sizes"][batch["shown"]]
    step = -(-max(images.shape[2:]) // _SHOWN_PIXELS)
    return {
        "pictures": images[:, :, ::step, ::step],
        "picture_sizes": -(-sizes // step),
        "picture_ids": batch["image_ids"][batch["shown"]],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _DetectionsAndTruth:
    """All detections and the truth; COCO's evaluation matches the two by the images' ids."""

    categories: Sequence[Category]
    found: Mapping[str, Tensor]  # a row for each image
    truth: Mapping[str, Tensor]  # a row for each object

    @classmethod
    def of(cls, parts: Sequence[Partial]) -> "_DetectionsAndTruth":
        """Join the parts of `partial`, in any order."""
        joined = {
            name: torch.cat([part.tensors[name] for part in parts])
            for name in ("image_ids", "scores", "labels", "boxes", "original_sizes", *_TRUTH)
        }
        return cls(
            categories=read(parts[0].tensors["categories"]),
            found={n: t for n, t in joined.items() if n not in _TRUTH},
            truth={n.removeprefix("truth_"): joined[n] for n in _TRUTH},
        )

    def size(self, image_id: int) -> tuple[int, int]:
        """Height and width of an image."""
        row = int((self.found["image_ids"] == image_id).nonzero()[0])
        height, width = self.found["original_sizes"][row].tolist()
        return height, width

    def _numbers(self, image_ids: Tensor) -> Tensor:
        """Number images by their order, because results are floats and cannot hold every id."""
        return torch.searchsorted(self.found["image_ids"].sort().values, image_ids)

    def as_coco(self) -> dict[str, Any]:
        """Return the truth in COCO's format; images are numbered, a category's id is label + 1."""
        columns = (self.truth[n].tolist() for n in ("labels", "boxes", "areas", "crowds"))
        of_images = self._numbers(self.truth["images"]).tolist()
        sizes = self.found["original_sizes"].tolist()
        return {
            "images": [
                {"id": number, "height": height, "width": width}
                for number, (height, width) in zip(
                    self._numbers(self.found["image_ids"]).tolist(), sizes, strict=True
                )
            ],
            "annotations": [
                {
                    "id": number,  # from 1: 0 means "not matched" to COCO's evaluation
                    "image_id": image,
                    "category_id": label + 1,
                    "bbox": box,
                    "area": area,
                    "iscrowd": int(crowd),
                }
                for number, (image, label, box, area, crowd) in enumerate(
                    zip(of_images, *columns, strict=True), 1
                )
            ],
            "categories": [
                {"id": label, "name": category.name}
                for label, category in enumerate(self.categories, 1)
            ],
        }

    def as_results(self) -> "np.ndarray[Any, Any]":
        """Return one row per detection: image, x, y, width, height, score, category."""
        boxes_NK4 = self.found["boxes"].double()
        num = boxes_NK4.shape[1]
        columns = [
            self._numbers(self.found["image_ids"]).repeat_interleave(num).double()[:, None],
            boxes_NK4[..., :2].reshape(-1, 2),
            (boxes_NK4[..., 2:] - boxes_NK4[..., :2]).reshape(-1, 2),
            self.found["scores"].double().reshape(-1, 1),
            self.found["labels"].double().reshape(-1, 1) + 1,
        ]
        return torch.cat(columns, dim=1).numpy()


def _judged(detections: _DetectionsAndTruth) -> tuple[list[float], list[dict[str, Any]]]:
    """Compute COCO's twelve figures, -1 where unknown, and a row for each class."""
    if missing := missing_package("faster-coco-eval", "the evaluation"):
        raise UserError(missing[0])
    from faster_coco_eval import COCO, COCOeval_faster

    truth = COCO(detections.as_coco())
    results = detections.as_results()
    judge = COCOeval_faster(truth, truth.loadRes(results), iouType="bbox")
    judge.run()
    precision_TRKAM, scores_TRKAM = judge.eval["precision"], judge.eval["scores"]
    counts = torch.bincount(
        detections.truth["labels"][~detections.truth["crowds"]],
        minlength=len(detections.categories),
    ).tolist()
    classes: list[dict[str, Any]] = []
    for label, category in enumerate(detections.categories):
        # All areas, 100 detections per image.
        precision_TR = precision_TRKAM[:, :, label, 0, -1]
        classes.append(
            {
                "class": category.name,
                "objects": counts[label],
                "AP": _mean(precision_TR),
                "AP50": _mean(precision_TR[0]),
                **_best_threshold(precision_TR[0], scores_TRKAM[0, :, label, 0, -1]),
            }
        )
    return [float(value) for value in judge.stats], classes


def _mean(precision: "np.ndarray[Any, Any]") -> float:
    known = precision[precision > -1]
    return float(known.mean()) if len(known) else -1.0


def _best_threshold(
    precision_R: "np.ndarray[Any, Any]", score_R: "np.ndarray[Any, Any]"
) -> dict[str, float]:
    """Find the score threshold with the best F1, from precision and recall at an IoU of 0.5."""
    recall_R = np.linspace(0.0, 1.0, len(precision_R))
    known = np.maximum(precision_R, 0.0)
    f1_R = 2 * known * recall_R / np.maximum(known + recall_R, 1e-12)
    best = int(f1_R.argmax())
    return {
        "best F1": float(f1_R[best]),
        "at score": float(score_R[best]),
        "precision": float(known[best]),
        "recall": float(recall_R[best]),
    }


def _shown(tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, int]]:
    """Return the images of a part that are to be shown, without padding, and their ids."""
    if "pictures" not in tensors:
        return []
    columns = (tensors["picture_sizes"].tolist(), tensors["picture_ids"].tolist())
    return [
        (image[:, :height, :width], image_id)
        for image, (height, width), image_id in zip(tensors["pictures"], *columns, strict=True)
    ]


_Rows = list[tuple[int, tuple[float, ...], str]]


def _panels(detections: _DetectionsAndTruth, image_id: int) -> tuple[_Rows, _Rows]:
    """Return truth and detections as label, box (x, y, width, height) and caption."""
    truth, found = detections.truth, detections.found
    there = (truth["images"] == image_id).nonzero().flatten().tolist()
    objects: _Rows = [
        (int(truth["labels"][k]), tuple(truth["boxes"][k].tolist()), "") for k in there
    ]
    row = int((found["image_ids"] == image_id).nonzero()[0])
    strong = found["scores"][row].argsort(descending=True)[:_MOST_DRAWN].tolist()
    detected: _Rows = []
    for k in strong:
        score = float(found["scores"][row, k])
        if score >= _LEAST_SCORE:
            x, y, right, bottom = found["boxes"][row, k].tolist()
            box = (x, y, right - x, bottom - y)
            detected.append((int(found["labels"][row, k]), box, f"{score:.2f}"))
    return objects, detected


def _drawn(image: Tensor, rows: _Rows, size: tuple[int, int]) -> "np.ndarray[Any, Any]":
    """Draw boxes, given in pixels of the original image of `size`, on its picture."""
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    draw, scale = ImageDraw.Draw(picture), picture.height / size[0]
    for label, (x, y, w, h), caption in rows:
        left, top, right, bottom = (scale * side for side in (x, y, x + w, y + h))
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=_color(label))
        draw.text((left + 2, top), caption, fill=_color(label))
    return np.asarray(picture)


def _as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def _color(label: int) -> str:
    return _COLORS[label % len(_COLORS)]
