"""Samples are functions of seed, epoch and index; batches are as large as they must be."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from contract.errors import UserError
from tests.training.workloads.detection import coco_scene as scene
from training.durable.store.local_dataset import LocalDataset
from training.workload import Inputs
from training.workloads.detection.config import laptop
from training.workloads.detection.detection_dataset import (
    _annotations_file,
    import_folder,
    make_dataset,
    open_split,
)
from training.workloads.detection.detection_workload import TrainDetector
from training.workloads.detection.image_files import read_rgb
from training.workloads.detection.samples import Augmentation, DetectionSamples, read

SMALL = Augmentation(
    scales=(32, 48), longest_side=80, crop_scales=(40, 60), crop_sides=(24, 40), eval_scale=48
)


def inputs(folder: Path) -> Inputs:
    return cast(Inputs, SimpleNamespace(dataset=LocalDataset.complete(folder, "detection", {})))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Images of several sizes; the first has no objects, the second a crowd and an empty box."""
    train, validation = scene.content(24), scene.content(6, first=24)
    for number, image in enumerate(train["images"]):
        image["width"], image["height"] = 60 + 3 * number, 50 + 7 * (number % 5)
    train["annotations"] = train["annotations"][2:]
    train["annotations"][0]["iscrowd"] = 1
    train["annotations"] += [
        {"id": 900, "image_id": 1, "category_id": 2, "bbox": [3, 3, 0, 9], "area": 0, "iscrowd": 0},
        {"id": 901, "image_id": 1, "category_id": 1, "bbox": [5, 5, 9, 9], "area": 9, "iscrowd": 0},
    ]
    folder = tmp_path_factory.mktemp("detection")
    scene.lay_out(folder / "own", train, validation)
    (folder / "out").mkdir()
    import_folder(folder / "own", folder / "out", 0, lambda done, total: None)
    return inputs(folder / "out")


def detection_samples(i: Inputs, name: str, augmentation: Augmentation, bucket: int = 1) -> Any:
    return DetectionSamples(
        split=open_split(i.dataset, name),
        dataset=i.dataset,
        augmentation=augmentation,
        bucket=bucket,
    )


def failures(i: Inputs, num_classes: int, num_queries: int) -> Sequence[str]:
    config = replace(laptop(), num_classes=num_classes, num_queries=num_queries)
    return TrainDetector(config=config).start(nn.Identity(), i).failures


def sample(samples: DetectionSamples, index: int, epoch: int, seed: int) -> Any:
    return samples.get(index, epoch, torch.Generator().manual_seed(seed))


def test_a_sample_depends_on_its_generator_alone(data: Inputs) -> None:
    samples = detection_samples(data, "train", SMALL)
    one, same, other = (sample(samples, 5, 0, seed) for seed in (1, 1, 4))
    assert torch.equal(one.image, same.image)
    assert torch.equal(one.boxes, same.boxes)
    assert one.image.shape != other.image.shape or not torch.equal(one.image, other.image)
    whole = sample(samples, 5, -1, 1)
    assert torch.equal(whole.image, sample(samples, 5, -1, 2).image)
    assert whole.image.shape[1:] == (48, 72)  # of 50x75 pixels


def test_a_batch_is_padded_below_and_on_the_right(data: Inputs) -> None:
    samples = detection_samples(data, "train", SMALL)
    items = [sample(samples, index, 0, index) for index in range(6)]
    batch = samples.collate(items)
    heights, widths = zip(*(item.image.shape[1:] for item in items), strict=True)
    assert batch["images"].shape == (6, 3, max(heights), max(widths))
    assert batch["images"].dtype == torch.uint8
    assert batch["sizes"].tolist() == [[*size] for size in zip(heights, widths, strict=True)]
    for row, item in enumerate(items):
        height, width = item.image.shape[1:]
        assert torch.equal(batch["images"][row, :, :height, :width], item.image)
        assert not batch["images"][row, :, height:].any()
        assert not batch["images"][row, :, :, width:].any()
        num = len(item.labels)
        assert torch.equal(batch["boxes"][row, :num], item.boxes)
        assert (batch["labels"][row] >= 0).sum() == num
        assert not batch["boxes"][row, num:].any()
    assert batch["image_ids"].tolist() == list(range(6))
    assert batch["original_sizes"][2].tolist() == [64, 66]
    assert "truth_boxes" not in batch


def test_each_sample_lies_in_a_file_of_its_own(data: Inputs) -> None:
    samples = detection_samples(data, "validation", SMALL)
    assert samples.files(torch.tensor([2, 0])) == ["validation/26.png", "validation/24.png"]


def test_buckets_leave_few_shapes(data: Inputs) -> None:
    samples = detection_samples(data, "train", SMALL, bucket=32)
    shapes = {
        tuple(samples.collate([sample(samples, index, 0, index)])["images"].shape[2:])
        for index in range(24)
    }
    assert {side % 32 for shape in shapes for side in shape} == {0}
    assert len(shapes) <= 9


def test_a_batch_without_objects_has_none(data: Inputs) -> None:
    samples = detection_samples(data, "train", SMALL)
    for epoch in (0, -1):
        batch = samples.collate([sample(samples, 0, epoch, 0)])
        assert batch["labels"].shape == (1, 0)
        assert batch["boxes"].shape == (1, 0, 4)
    assert batch["truth_boxes"].shape == (0, 4)


def test_crowds_and_empty_boxes_are_evaluated_and_not_learned(data: Inputs) -> None:
    samples = detection_samples(data, "train", SMALL)
    batch = samples.collate([sample(samples, 1, -1, 0), sample(samples, 2, -1, 0)])
    assert batch["labels"].tolist() == [[1, 0], [0, 1]]
    assert batch["truth_images"].tolist() == [1, 1, 1, 1, 2, 2]
    assert batch["truth_crowds"].tolist() == [True, False, False, False, False, False]
    assert batch["truth_labels"].tolist() == [0, 1, 1, 0, 0, 1]
    assert batch["truth_boxes"][2].tolist() == [3, 3, 0, 9]
    assert read(batch["categories"]) == [(1, "wall"), (2, "room")]
    assert batch["shown"].tolist() == [0, 1]


def test_a_model_that_does_not_fit_the_dataset_is_refused(data: Inputs) -> None:
    assert failures(data, 2, 300) == []
    classes, queries = failures(data, 3, 3)
    assert classes == (
        "the model has 3 classes, but the dataset has 2 (wall, room); pass --override num_classes=2"
    )
    assert queries.startswith("the model has 3 queries, but an image has 4 objects, and it can")


def test_faults_of_validation_are_found_before_the_first_epoch(tmp_path: Path) -> None:
    scene.lay_out(tmp_path / "own", scene.content(4), scene.content(4, first=4))
    (tmp_path / "out").mkdir()
    import_folder(tmp_path / "own", tmp_path / "out", 0, lambda done, total: None)
    scene.write(tmp_path / "out" / _annotations_file("validation"), {"images": []})
    with pytest.raises(UserError, match=r"instances_validation\.json has no list 'annotations'"):
        failures(inputs(tmp_path / "out"), 2, 300)


def test_fails_for_an_image_of_another_size(tmp_path: Path) -> None:
    scene.picture(5, width=20, height=30).save(tmp_path / "x.png")
    with pytest.raises(UserError, match="cannot be read as an image of 30x20: it has 20x30 pixels"):
        read_rgb(tmp_path / "x.png", 20, 30)


def test_drawn_plans_have_both_classes_under_their_boxes(tmp_path: Path) -> None:
    make_dataset(tmp_path, 30, 0, lambda done, total: None)
    (tmp_path / "again").mkdir()
    make_dataset(tmp_path / "again", 30, 0, lambda done, total: None)
    data = inputs(tmp_path)
    samples = detection_samples(data, "train", SMALL)
    split, empty = samples.split, 0
    for index in range(len(split)):
        path = tmp_path / "train" / str(split.files[index])
        assert path.read_bytes() == (tmp_path / "again/train" / path.name).read_bytes()
        pixels = np.asarray(Image.open(path)).astype(float).mean(axis=2)
        objects = split.objects(index)
        empty += objects.start == objects.stop
        for (x, y, w, h), label in zip(split.boxes[objects], split.labels[objects], strict=True):
            assert 0 <= x < x + w <= split.sizes[index, 1] + 0.01
            assert 0 <= y < y + h <= split.sizes[index, 0] + 0.01
            if label == 1:  # Left of a room is a wall, which is darker in each row.
                rows = pixels[round(y + h * 0.3) : round(y + h * 0.7)]
                room = np.median(rows[:, round(x + 4) : round(x + w - 4)])
                assert rows[:, max(0, round(x) - 5) : round(x) + 3].min(axis=1).mean() < room - 12
                assert min(w, h) > 25
    assert 0 < empty < len(split) / 3
    assert set(split.labels.tolist()) == {0, 1}
    with pytest.raises(UserError, match="count is 5; give at least 20"):
        make_dataset(tmp_path, 5, 0, lambda done, total: None)
