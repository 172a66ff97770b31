"""A small dataset in COCO's format to break: two splits of images, each with a wall and a room."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.training.tiny import Tiny
from training.durable.data_report import DataReport
from training.engine.job import WorkloadProxy
from training.workload import Progress
from training.workloads.detection import detection_dataset
from training.workloads.detection.check import Checked, check

WIDTH, HEIGHT = 64, 48
CATEGORIES = [{"id": 1, "name": "wall"}, {"id": 2, "name": "room"}]


def content(count: int, first: int = 0) -> dict[str, Any]:
    """A split's annotations as COCO writes them; images are named by number."""
    images = [
        {"id": n, "file_name": f"{n}.png", "width": WIDTH, "height": HEIGHT}
        for n in range(first, first + count)
    ]
    boxes = {1: [2.0, 3.0, 40.0, 6.0], 2: [10.0, 12.0, 30.0, 20.0]}
    annotations = [
        {
            "id": 2 * image["id"] + category,
            "image_id": image["id"],
            "category_id": category,
            "bbox": list(box),
            "area": box[2] * box[3],
            "iscrowd": 0,
            "segmentation": [],
        }
        for image in images
        for category, box in boxes.items()
    ]
    categories = [dict(category) for category in CATEGORIES]
    return {"images": images, "annotations": annotations, "categories": categories}


def picture(seed: int, width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """An image that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save_images(content: Mapping[str, Any], folder: Path) -> None:
    """Draw the images that annotations name."""
    for image in content["images"]:
        path = folder / image["file_name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(int(image["id"]), image["width"], image["height"]).save(path)


def write(path: Path, content: Any) -> None:
    """Annotations as a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def lay_out(folder: Path, train: dict[str, Any], validation: dict[str, Any]) -> Path:
    """COCO's own layout: annotations/instances_train2017.json, train2017/IMAGE."""
    for split, of_split in (("train2017", train), ("val2017", validation)):
        write(folder / f"annotations/instances_{split}.json", of_split)
        save_images(of_split, folder / split)
    return folder


def checked(folder: Path) -> Checked:
    """The folder's check, without progress."""
    return check(folder, lambda done, total: None)


class CocoData(WorkloadProxy):
    """The data of the detection workload, without its model."""

    name = "coco-data"

    def make_dataset(self, out: Path, count: int, seed: int, progress: Progress) -> Any:
        return detection_dataset.make_dataset(out, count, seed, progress)

    def import_folder(self, folder: Path, out: Path, seed: int, progress: Progress) -> Any:
        return detection_dataset.import_folder(folder, out, seed, progress)

    def check_data(self, folder: Path, progress: Progress) -> DataReport:
        return check(folder, progress).report


COCO_DATA = CocoData(Tiny())
