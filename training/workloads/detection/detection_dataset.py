"""The detection dataset on disk: COCO's own layout, as other tools read it.

annotations/instances_SPLIT.json without masks, and SPLIT/IMAGE: each image in its own file, so a
run can start before all have arrived. It is imported from folders in COCO's format, or made of
drawn floor plans. Imports no torch.
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contract.errors import UserError
from training.workloads.detection.check import Checked, check, check_annotations
from training.workloads.detection.coco import Category, CocoImage, CocoSplit, as_split, read_split
from training.workloads.detection.coco_faults import Box, CocoFaults
from training.workloads.detection.coco_layout import UNDIVIDED
from training.workloads.detection.floor_plans import CATEGORIES, draw_floor_plan

if TYPE_CHECKING:
    # It imports torch.
    from training import Dataset, Progress

_log = logging.getLogger(__name__)

# Choices are made on validation; test is for one final `python -m training evaluate`.
_HELD_OUT_SHARES: Mapping[str, float] = {"validation": 0.15, "test": 0.1}
# The figures of a split of a few images mean nothing.
_MIN_COUNT = 20
_DIVIDE, _DRAW = 4, 5  # first words of the seed sequences


def _annotations_file(split: str) -> str:
    """Return the name of a split's annotation file within the dataset."""
    return f"annotations/instances_{split}.json"


def open_split(dataset: "Dataset", split: str) -> CocoSplit:
    """Open a split; it waits only for the annotations. UserError if they have faults."""
    name = _annotations_file(split)
    try:
        path = dataset.file(name)
    except UserError as error:
        raise UserError(f"the dataset has no split {split!r}: {error}") from error
    return _read(path, split, dataset.fingerprint)


@lru_cache(maxsize=4)
def _read(path: Path, split: str, fingerprint: str) -> CocoSplit:
    """Read a split, once for all evaluations; `fingerprint` distinguishes datasets at one path."""
    faults = CocoFaults()
    found = read_split(path, split, lambda _: path.parent.parent / split, faults)
    if found is not None:
        check_annotations([found], faults)
    faults.refuse()
    assert found is not None
    return found


def import_folder(folder: Path, out: Path, seed: int, progress: "Progress") -> Mapping[str, Any]:
    """Copy a folder in COCO's format into the empty folder `out`; return the meta.

    It refuses what `data check` refuses. A single annotation file without a split is divided by
    `seed`, with equal images in the same split.
    """
    checked = check(folder, lambda done, total: progress(done, 2 * total))
    report = checked.report
    report.refuse()
    for finding in report.warnings:
        _log.warning("[data] %s", finding.message)
    parts = _parts(checked, seed)
    done = total = sum(len(rows) for _, _, rows in parts)
    for name, split, rows in parts:
        _write_annotations(out, replace(split, name=name), rows)
        for file in split.files[rows].tolist():
            target = out / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(split.folder / file, target)
            done += 1
            progress(done, 2 * total)
    most = max(int(split.objects_per_image.max()) for split in checked.splits)
    sizes = {name: len(rows) for name, _, rows in parts}
    images = [path for name in sizes for path in (out / name).rglob("*") if path.is_file()]
    facts = {
        "most_objects": most,
        "objects": sum(int(split.objects_per_image.sum()) for split in checked.splits),
        "image_bytes": round(sum(path.stat().st_size for path in images) / len(images)),
    }
    return {**_meta(checked.splits[0].categories, sizes), **facts}


def make_dataset(out: Path, count: int, seed: int, progress: "Progress") -> Mapping[str, Any]:
    """Draw `count` floor plans into the empty folder `out`; return the meta."""
    if count < _MIN_COUNT:
        raise UserError(f"count is {count}; give at least {_MIN_COUNT}")
    if seed < 0:
        raise UserError(f"seed is {seed}; give 0 or more")
    numbers = _divided(np.arange(count), seed)
    for name in numbers:
        (out / name).mkdir(parents=True)
    split_of = {number: name for name, of_split in numbers.items() for number in of_split}
    images: dict[str, list[CocoImage]] = {name: [] for name in numbers}
    boxes: dict[str, list[Box]] = {name: [] for name in numbers}
    for number in range(count):
        plan = draw_floor_plan(np.random.default_rng([_DRAW, seed, number]))
        name = split_of[number]
        plan.image.save(out / name / _file(number))
        images[name].append(CocoImage(number, _file(number), plan.image.height, plan.image.width))
        for category, box in plan.objects:
            x, y, width, height = (round(value, 2) for value in box)
            area = round(width * height, 2)
            boxes[name].append(Box(number, category, (x, y, width, height), area, False))
        progress(number + 1, count)
    for name in numbers:
        drawn = as_split(name, out / name, CATEGORIES, images[name], boxes[name])
        _write_annotations(out, drawn, range(len(drawn)))
    sizes = {name: len(of_split) for name, of_split in numbers.items()}
    per_image = Counter(box.image_id for of_split in boxes.values() for box in of_split)
    return {**_meta(CATEGORIES, sizes), "most_objects": max(per_image.values()), "seed": seed}


def _file(number: int) -> str:
    return f"plan-{number:06}.png"


def _parts(checked: Checked, seed: int) -> list[tuple[str, CocoSplit, "list[int]"]]:
    """Return for each split its name, the source split and the rows of its images."""
    first = checked.splits[0]
    if first.name != UNDIVIDED:
        return [(split.name, split, list(range(len(split)))) for split in checked.splits]
    if len(first) < _MIN_COUNT:
        raise UserError(
            f"{len(first)} images without splits are too few to divide; provide at least "
            f"{_MIN_COUNT}, or annotations for train and validation"
        )
    _, same = np.unique(np.asarray(checked.digests[first.name], np.str_), return_inverse=True)
    divided = _divided(same, seed)
    can_be_learned = first.can_be_learned
    for name, rows in divided.items():
        if not any(can_be_learned[first.objects(row)].any() for row in rows):
            raise UserError(
                f"none of the {len(rows)} images that were divided into {name} has objects; pass "
                "another --seed, or provide annotations for train and validation"
            )
    return [(name, first, rows) for name, rows in divided.items()]


def _divided(groups: "np.ndarray[Any, Any]", seed: int) -> dict[str, list[int]]:
    """Divide items into the splits, keeping each group together."""
    rng = np.random.default_rng([_DIVIDE, seed])
    left = rng.permutation(int(groups.max()) + 1)
    count, splits = len(left), dict[str, list[int]]()
    for name, share in _HELD_OUT_SHARES.items():
        held_out, left = np.split(left, [max(1, round(share * count))])
        splits[name] = np.flatnonzero(np.isin(groups, held_out)).tolist()
    return {"train": np.flatnonzero(np.isin(groups, left)).tolist(), **splits}


def _write_annotations(out: Path, split: CocoSplit, rows: Iterable[int]) -> None:
    """Write some rows of a split as they were annotated, in COCO's notation."""
    images: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for row in rows:
        height, width = split.sizes[row].tolist()
        image_id = int(split.image_ids[row])
        images.append(
            {"id": image_id, "file_name": str(split.files[row]), "width": width, "height": height}
        )
        of_row = split.objects(row)
        values = (split.boxes, split.labels, split.areas, split.crowds)
        for box, label, area, crowd in zip(*(v[of_row].tolist() for v in values), strict=True):
            objects.append(
                {
                    "id": len(objects) + 1,
                    "image_id": image_id,
                    "category_id": split.categories[label].id,
                    "bbox": box,
                    "area": area,
                    "iscrowd": int(crowd),
                }
            )
    categories = [category._asdict() for category in split.categories]
    content = {"images": images, "annotations": objects, "categories": categories}
    path = out / _annotations_file(split.name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content) + "\n")


def _meta(categories: Sequence[Category], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what the manifest says about the dataset."""
    return {
        "classes": [category.name for category in categories],
        "category_ids": [category.id for category in categories],
        "count": sum(sizes.values()),
        "splits": dict(sizes),
    }
