"""The figures are pycocotools' own, in any order of the parts; what predict writes, COCO reads."""

import contextlib
import csv
import io
import json
import random
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from contract.errors import UserError
from training.workload import Partial
from training.workloads.detection.coco import Category
from training.workloads.detection.config import laptop
from training.workloads.detection.detection_workload import TrainDetector
from training.workloads.detection.detector import Detections
from training.workloads.detection.evaluation import _DetectionsAndTruth, _judged, missing_package
from training.workloads.detection.samples import Batch, written

NUM_IMAGES, NUM_DETECTIONS = 30, 25
# Classes whose names are those of COCO's sizes, and one without objects.
CATEGORIES = (Category(3, "wall"), Category(7, "small"), Category(90, "none"))
Found = tuple[Tensor, Tensor, Tensor]


class Given(TrainDetector):
    """Finds what it is called with in place of a model."""

    def found(self, m: Any, b: Batch) -> Detections:
        return Detections(*m)


STAGE = Given(config=laptop())


def truth(rng: np.random.Generator, image_ids: list[int]) -> Batch:
    """Images of 400x600 with up to eight objects of all sizes, some of them crowds."""
    counts = rng.integers(0, 9, len(image_ids))
    num = int(counts.sum())
    sides = rng.uniform(8, 180, (num, 2))
    corners = rng.uniform(0, 1, (num, 2)) * (np.array([600, 400]) - sides)
    boxes = np.concatenate([corners, sides], axis=1)
    return {
        "image_ids": torch.tensor(image_ids),
        "original_sizes": torch.tensor([[400, 600]] * len(image_ids)),
        "truth_images": torch.tensor(image_ids).repeat_interleave(torch.from_numpy(counts)),
        "truth_labels": torch.from_numpy(rng.integers(0, 2, num)),
        "truth_boxes": torch.from_numpy(boxes),
        "truth_areas": torch.from_numpy(boxes[:, 2] * boxes[:, 3] * 0.8),
        "truth_crowds": torch.from_numpy(rng.random(num) < 0.1),
        "categories": written(CATEGORIES),
        "shown": torch.tensor([], dtype=torch.int64),
        "images": torch.zeros(len(image_ids), 3, 40, 60, dtype=torch.uint8),
        "sizes": torch.tensor([[40, 60]] * len(image_ids)),
    }


def found(rng: np.random.Generator, batch: Batch) -> Found:
    """Some objects with errors, some of the wrong class, some out of nowhere; equal scores too."""
    shape = (len(batch["image_ids"]), NUM_DETECTIONS)
    scores = torch.from_numpy(rng.integers(0, 20, shape) / 20.0)
    labels = torch.from_numpy(rng.integers(0, 3, shape))
    xywh = torch.from_numpy(rng.uniform(0, 150, (*shape, 4)))
    for row, image_id in enumerate(batch["image_ids"].tolist()):
        own = (batch["truth_images"] == image_id).nonzero().flatten()
        for place, k in enumerate(own.tolist()):
            noise = torch.from_numpy(rng.normal(0, 1 + 3 * (place % 3), 4))
            xywh[row, place] = (batch["truth_boxes"][k] + noise).clamp(min=0.5)
            if place % 4:
                labels[row, place] = batch["truth_labels"][k]
    boxes = torch.cat([xywh[..., :2], xywh[..., :2] + xywh[..., 2:]], dim=-1)
    return scores, labels, boxes


def parts(seed: int, first_id: int = 0) -> tuple[list[Partial], list[tuple[Batch, Found]]]:
    rng = np.random.default_rng(seed)
    ids = (first_id + rng.permutation(1000)[:NUM_IMAGES]).tolist()
    batches = [truth(rng, ids[first : first + 7]) for first in range(0, NUM_IMAGES, 7)]
    pairs = [(batch, found(rng, batch)) for batch in batches]
    return [STAGE.evaluate(cast(Any, found), batch) for batch, found in pairs], pairs


def as_pycocotools(seed: int) -> list[float]:
    """COCO's twelve figures, by its own tools from files as its users have them."""
    _, pairs = parts(seed)
    images, annotations, results = [], [], []
    for batch, detections in pairs:
        images += [{"id": n, "height": 400, "width": 600} for n in batch["image_ids"].tolist()]
        names = ("images", "labels", "boxes", "areas", "crowds")
        columns = (batch[f"truth_{name}"].tolist() for name in names)
        annotations += [
            {
                "image_id": image,
                "category_id": CATEGORIES[label].id,
                "bbox": box,
                "area": area,
                "iscrowd": int(crowd),
            }
            for image, label, box, area, crowd in zip(*columns, strict=True)
        ]
        results += as_detected(batch, *detections)
    for number, annotation in enumerate(annotations, 1):
        annotation["id"] = number
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": images,
            "annotations": annotations,
            "categories": [category._asdict() for category in CATEGORIES],
        }
        coco.createIndex()
        judge = COCOeval(coco, coco.loadRes(results), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return [float(value) for value in judge.stats]


def as_detected(batch: Batch, scores: Tensor, labels: Tensor, boxes: Tensor) -> list[object]:
    """COCO's results, without the rounding of what `predict` writes."""
    x_y_w_h = boxes.float().double()
    x_y_w_h[..., 2:] -= x_y_w_h[..., :2]
    return [
        {"image_id": image, "category_id": CATEGORIES[label].id, "bbox": box, "score": score}
        for image, of_image in zip(
            batch["image_ids"].tolist(),
            zip(labels.tolist(), x_y_w_h.tolist(), scores.float().tolist(), strict=True),
            strict=True,
        )
        for label, box, score in zip(*of_image, strict=True)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_all_twelve_figures_are_pycocotools_own(seed: int) -> None:
    ours = _judged(_DetectionsAndTruth.of(parts(seed)[0]))[0]
    theirs = as_pycocotools(seed)
    assert len(ours) == len(theirs) == 12
    assert 0.05 < theirs[0] < 0.9
    assert ours == theirs


def test_ids_that_no_float_holds_change_no_figure() -> None:
    small, huge = (_judged(_DetectionsAndTruth.of(parts(0, n)[0])) for n in (0, 2**62))
    assert huge == small


def test_figures_do_not_depend_on_the_order_of_the_parts(tmp_path: Path) -> None:
    ordered, _ = parts(0)
    once = STAGE.summarize(ordered, tmp_path)
    for seed in range(3):
        mixed = ordered.copy()
        random.Random(seed).shuffle(mixed)
        assert STAGE.summarize(mixed, tmp_path) == once


def test_each_class_has_its_own_figures_and_a_threshold(tmp_path: Path) -> None:
    found, _ = parts(1)
    metrics = STAGE.summarize(found, tmp_path)
    assert metrics["AP"] == pytest.approx((metrics["AP_wall"] + metrics["AP_class_small"]) / 2)
    assert metrics["AP50_wall"] > metrics["AP_wall"] > 0
    assert metrics["AP_small"] != metrics["AP_class_small"]
    assert not [name for name in metrics if "none" in name], "unknown without objects"
    rows = list(csv.DictReader((tmp_path / "classes.csv").read_text().splitlines()))
    assert [row["class"] for row in rows] == ["wall", "small", "none"]
    assert 0 < float(rows[0]["at score"]) < 1
    assert float(rows[0]["precision"]) > 0.1
    assert rows[2]["AP50"] == ""


def perfect(batch: Batch) -> Partial:
    shape = (len(batch["image_ids"]), 9)
    scores, labels, boxes = torch.zeros(shape), torch.zeros(shape).long(), torch.zeros(*shape, 4)
    for row, image_id in enumerate(batch["image_ids"].tolist()):
        own = (batch["truth_images"] == image_id) & ~batch["truth_crowds"]
        xywh = batch["truth_boxes"][own].float()
        scores[row, : len(xywh)] = 0.9
        labels[row, : len(xywh)] = batch["truth_labels"][own]
        boxes[row, : len(xywh)] = torch.cat([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], dim=1)
    return STAGE.evaluate(cast(Any, (scores, labels, boxes)), batch)


def test_perfect_detections_are_perfect_and_a_crowd_costs_nothing(tmp_path: Path) -> None:
    batch = truth(np.random.default_rng(5), list(range(20)))
    batch["truth_crowds"][:3] = True
    metrics = STAGE.summarize([perfect(batch)], tmp_path)
    assert metrics["AP"] == metrics["AP50"] == metrics["AP_wall"] == 1.0


def test_detections_of_images_without_objects_count_as_false(tmp_path: Path) -> None:
    batch = truth(np.random.default_rng(5), list(range(20)))
    one = perfect(batch)
    empty = truth(np.random.default_rng(6), [100])
    for name in ("images", "labels", "boxes", "areas", "crowds"):
        empty[f"truth_{name}"] = empty[f"truth_{name}"][:0]
    shape = (1, 9)
    false = torch.ones(shape), torch.zeros(shape).long(), torch.ones(*shape, 4)
    other = STAGE.evaluate(cast(Any, false), empty)
    assert STAGE.summarize([one, other], tmp_path)["AP50"] < 1.0
    with pytest.raises(ValueError, match="the evaluated images have no objects, so their average"):
        STAGE.summarize([other], tmp_path)


def test_predictions_are_coco_s_results_in_the_dataset_s_own_ids() -> None:
    _, ((batch, detections), *_) = parts(2)
    of_images = STAGE.predict(cast(Any, detections), batch)
    assert [image["image_id"] for image in of_images] == batch["image_ids"].tolist()
    results = [d for image in of_images for d in STAGE.result_list(image)]
    assert {d["category_id"] for d in results} == {3, 7, 90}
    assert {tuple(d) for d in results} == {("image_id", "category_id", "bbox", "score")}
    scores = [d["score"] for d in of_images[0]["detections"]]
    assert scores == sorted(scores, reverse=True)
    x, y, right, bottom = detections[2][0, int(detections[0][0].argmax())].tolist()
    assert of_images[0]["detections"][0]["bbox"] == pytest.approx(
        [x, y, right - x, bottom - y], abs=1e-3
    )
    json.dumps(results)


def test_fails_on_a_dataset_of_other_classes_than_the_model_s() -> None:
    """A class's number is its place among the dataset's: of other classes it means another one."""
    stage, (batch, _) = TrainDetector(config=laptop()), parts(2)[1][0]
    for act in (stage.evaluate, stage.predict):
        with pytest.raises(UserError, match="the dataset has 3 classes, but the model tells 2 apa"):
            act(nn.Identity(), batch)


def test_pictures_show_truth_and_detections(tmp_path: Path) -> None:
    batch = truth(np.random.default_rng(5), list(range(4)))
    batch["shown"] = torch.tensor([0, 2])
    part = perfect(batch)
    assert part.tensors["pictures"].shape == (2, 3, 40, 60)
    assert part.tensors["picture_ids"].tolist() == [0, 2]
    STAGE.show(nn.Identity(), cast(Any, None), [part], tmp_path)
    with Image.open(tmp_path / "detections.jpg") as drawn:
        assert drawn.width > 4 * 60
        blue = np.asarray(drawn)[32:].astype(int)
    # On white paper and black images: truth and detections, left and right.
    is_blue = (blue[..., 2] > 100) & (blue[..., 0] < 90)
    assert is_blue[:, 16:76].any() and is_blue[:, 76:136].any()


def test_without_pictures_nothing_is_drawn(tmp_path: Path) -> None:
    STAGE.show(nn.Identity(), cast(Any, None), parts(0)[0], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["faster-coco-eval", "scipy"])
def test_a_machine_without_a_package_is_told_before_the_first_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing_package(name, "this") == []
    monkeypatch.setitem(sys.modules, name.replace("-", "_"), None)
    (message,) = missing_package(name, "this")
    assert message == (
        f"this needs the package {name}, which is not installed; install it with "
        f"`pip install {name}`"
    )


def test_fails_to_evaluate_without_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(UserError, match="the evaluation needs the package faster-coco-eval"):
        STAGE.summarize(parts(0)[0], tmp_path)
