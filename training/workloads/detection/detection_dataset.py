"""The detection dataset on disk: COCO's own layout, as other tools read it.

annotations/instances_SPLIT.json without masks, and SPLIT/IMAGE: each image in its own file, so a
run can start before all have arrived. It is imported from folders in COCO's format, or made of
drawn floor plans. Imports no torch.

Draws floor plans with their walls and rooms: small, but not clean.

Plans are a little askew; walls are thick or thin, filled or hatched, with doors in them;
rooms have furniture; the paper has stains and noise. Some images have no plan at all. The generator
determines the drawing. Imports no torch.
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from contract.errors import UserError
from training.durable import DataRefusedError
from training.workloads.detection.check import Checked, check, check_annotations
from training.workloads.detection.coco import Category, CocoImage, CocoSplit, as_split, read_split
from training.workloads.detection.coco_faults import Box, CocoFaults

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
    found = read_split(path, split, lambda _: (path.parent.parent / split, {}), faults)
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
    for finding in report.findings:
        _log.warning("[%s] %s", "refused" if finding.is_refused else "warning", finding.message)
    report.refuse()
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
    return {**_meta(checked.splits[0].categories, sizes), **facts, "report": report}


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
    first, *others = checked.splits
    given = [(split.name, split, list(range(len(split)))) for split in checked.splits]
    if "validation" in [name for name, _, _ in given]:
        return given
    held_out = {"validation"} if others else {*_HELD_OUT_SHARES}  # the other one may be test
    if len(first) < _MIN_COUNT:
        raise DataRefusedError(
            f"{len(first)} images without splits are too few to divide; provide at least "
            f"{_MIN_COUNT}, or annotations for train and validation",
            checked.report,
        )
    _, same = np.unique(np.asarray(checked.digests[first.name], np.str_), return_inverse=True)
    divided = _divided(same, seed, held_out)
    can_be_learned = first.can_be_learned
    for name, rows in divided.items():
        if not any(can_be_learned[first.objects(row)].any() for row in rows):
            raise DataRefusedError(
                f"none of the {len(rows)} images that were divided into {name} has objects; pass "
                "another --seed, or provide annotations for train and validation",
                checked.report,
            )
    return [*((name, first, rows) for name, rows in divided.items()), *given[1:]]


def _divided(
    groups: "np.ndarray[Any, Any]", seed: int, held_out: Container[str] = _HELD_OUT_SHARES
) -> dict[str, list[int]]:
    """Divide items into the splits, keeping each group together."""
    rng = np.random.default_rng([_DIVIDE, seed])
    left = rng.permutation(int(groups.max()) + 1)
    count, splits = len(left), dict[str, list[int]]()
    for name, share in _HELD_OUT_SHARES.items():
        if name in held_out:
            own, left = np.split(left, [max(1, round(share * count))])
            splits[name] = np.flatnonzero(np.isin(groups, own)).tolist()
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


CATEGORIES = (Category(1, "wall"), Category(2, "room"))
WALL, ROOM = (category.id for category in CATEGORIES)
# Sides of an image, in pixels.
_SIDES = (112, 160)
_EMPTY_SHARE = 0.1
# Drawn this many times larger, then reduced, for smooth edges.
_SCALE = 3
# Rooms whose longer side is below the first are not divided; no room's side is below the second.
_DIVISIBLE, _SMALLEST = 66, 28

_Box: TypeAlias = tuple[float, float, float, float]
_Points: TypeAlias = npt.NDArray[np.float64]


class _FloorPlan(NamedTuple):
    """An image and its objects: category id and (x, y, width, height) in pixels."""

    image: Image.Image
    objects: list[tuple[int, _Box]]


class _Rectangle(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def corners(self) -> _Points:
        left, top, right, bottom = self
        return np.array([(left, top), (right, top), (right, bottom), (left, bottom)], np.float64)


def draw_floor_plan(rng: np.random.Generator) -> _FloorPlan:
    """Draw an image with sides within `_SIDES`; return it with its walls and rooms."""
    width, height = rng.integers(_SIDES[0], _SIDES[1] + 1, 2).tolist()
    sheet = _Sheet(width, height, rng)
    sheet.stain(int(rng.integers(2, 7)))
    objects = []
    if rng.random() >= _EMPTY_SHARE:
        objects = _draw_plan(sheet, rng)
    return _FloorPlan(image=sheet.image(), objects=objects)


def _draw_plan(sheet: "_Sheet", rng: np.random.Generator) -> list[tuple[int, _Box]]:
    margins = rng.uniform(5, 22, 4)
    outer = _Rectangle(margins[0], margins[1], sheet.width - margins[2], sheet.height - margins[3])
    thickness = float(rng.uniform(4.5, 8.5))
    rooms, walls = _divided_plan(outer, thickness, rng)
    sheet.turn(float(rng.uniform(-2.5, 2.5)))
    tints = rng.integers(205, 256, (len(rooms), 3))
    for room, tint in zip(rooms, tints.tolist(), strict=True):
        sheet.polygon(room.corners(), fill=tuple(tint))
        sheet.furnish(room)
    ink = tuple(rng.integers(0, 110, 3).tolist())
    is_hatched = bool(rng.random() < 0.3)
    for wall in walls:
        sheet.wall(wall, ink, is_hatched=is_hatched)
    for wall in walls[4:]:
        sheet.door(wall, thickness)
    found = [(WALL, wall) for wall in walls] + [(ROOM, room) for room in rooms]
    return [(category, sheet.extent(rectangle.corners())) for category, rectangle in found]


def _divided_plan(
    outer: _Rectangle, thickness: float, rng: np.random.Generator
) -> tuple[list[_Rectangle], list[_Rectangle]]:
    """Return rooms and walls: the four outer walls first, then those between rooms."""
    left, top, right, bottom = outer
    walls = [
        _Rectangle(left, top, right, top + thickness),
        _Rectangle(left, bottom - thickness, right, bottom),
        _Rectangle(left, top, left + thickness, bottom),
        _Rectangle(right - thickness, top, right, bottom),
    ]
    inside = _Rectangle(left + thickness, top + thickness, right - thickness, bottom - thickness)
    rooms, open_rooms = [], [inside]
    while open_rooms:
        room = open_rooms.pop()
        longer = max(room.width, room.height)
        if longer < _DIVISIBLE or (room != inside and rng.random() < 0.35):
            rooms.append(room)
            continue
        at = float(rng.uniform(_SMALLEST, longer - _SMALLEST - thickness))
        if room.width >= room.height:
            wall = _Rectangle(room.left + at, room.top, room.left + at + thickness, room.bottom)
            halves = [room._replace(right=wall.left), room._replace(left=wall.right)]
        else:
            wall = _Rectangle(room.left, room.top + at, room.right, room.top + at + thickness)
            halves = [room._replace(bottom=wall.top), room._replace(top=wall.bottom)]
        walls.append(wall)
        open_rooms += halves
    return rooms, walls


class _Sheet:
    """A sheet of paper to draw on, in pixels of the finished image."""

    def __init__(self, width: int, height: int, rng: np.random.Generator) -> None:
        self.width, self.height = width, height
        self._rng = rng
        self._center = np.array([width / 2, height / 2])
        self._turn = np.eye(2)
        paper = tuple(rng.integers(215, 256, 3).tolist())
        self._image = Image.new("RGB", (width * _SCALE, height * _SCALE), paper)
        self._draw = ImageDraw.Draw(self._image)

    def turn(self, degrees: float) -> None:
        """Rotate everything that is drawn from now on."""
        sine, cosine = np.sin(np.radians(degrees)), np.cos(np.radians(degrees))
        self._turn = np.array([[cosine, sine], [-sine, cosine]])

    def _placed(self, points: _Points) -> _Points:
        placed: _Points = (points - self._center) @ self._turn + self._center
        return placed

    def extent(self, points: _Points) -> _Box:
        """Return the box around a drawn polygon, within the sheet."""
        placed = np.clip(self._placed(points), 0, (self.width, self.height))
        (left, top), (right, bottom) = placed.min(axis=0).tolist(), placed.max(axis=0).tolist()
        return left, top, right - left, bottom - top

    def _scaled(self, points: _Points) -> list[tuple[float, float]]:
        # A pixel's centre is half a pixel from its border.
        return [(x, y) for x, y in (self._placed(points) * _SCALE - 0.5).tolist()]

    def polygon(self, points: _Points, fill: Any) -> None:
        self._draw.polygon(self._scaled(points), fill=fill)

    def line(self, points: _Points, color: Any, width: float = 1.0) -> None:
        self._draw.line(self._scaled(points), fill=color, width=max(1, round(width * _SCALE)))

    def stain(self, count: int) -> None:
        """Draw marks of all kinds that do not belong to a plan."""
        for _ in range(count):
            x, y = self._rng.uniform(0, (self.width, self.height))
            w, h = self._rng.uniform(2, 14, 2)
            color = tuple(self._rng.integers(90, 220, 3).tolist())
            if self._rng.random() < 0.5:
                self.line(np.array([(x, y), (x + w, y + h)]), color)
            else:
                self.polygon(_Rectangle(x, y, x + w / 2, y + h / 2).corners(), fill=color)

    def wall(self, wall: _Rectangle, ink: Any, *, is_hatched: bool) -> None:
        """Draw a wall, filled or hatched between its two lines."""
        corners = wall.corners()
        if not is_hatched:
            return self.polygon(corners, fill=ink)
        self.polygon(corners, fill=(235, 235, 235))
        for start in _steps(wall):
            self.line(start, ink, 0.8)
        return self.line(np.concatenate([corners, corners[:1]]), ink, 1.2)

    def door(self, wall: _Rectangle, thickness: float) -> None:
        """Draw an opening in a wall between rooms, with the leaf of the door."""
        length = max(wall.width, wall.height)
        size = float(self._rng.uniform(8, 13))
        at = float(self._rng.uniform(2, max(2.1, length - size - 2)))
        if wall.width > wall.height:
            opening = _Rectangle(wall.left + at, wall.top, wall.left + at + size, wall.bottom)
            leaf = np.array([(opening.left, wall.bottom), (opening.left, wall.bottom + size)])
        else:
            opening = _Rectangle(wall.left, wall.top + at, wall.right, wall.top + at + size)
            leaf = np.array([(wall.right, opening.top), (wall.right + size, opening.top)])
        self.polygon(opening.corners(), fill=(245, 245, 240))
        self.line(leaf, (60, 60, 60), thickness / 6)

    def furnish(self, room: _Rectangle) -> None:
        """Draw tables, beds and rugs, as outlines or filled."""
        for _ in range(int(self._rng.integers(0, 4))):
            w, h = self._rng.uniform(5, 16, 2)
            if w + 6 > room.width or h + 6 > room.height:
                continue
            x = float(self._rng.uniform(room.left + 2, room.right - w - 2))
            y = float(self._rng.uniform(room.top + 2, room.bottom - h - 2))
            corners = _Rectangle(x, y, x + w, y + h).corners()
            color = tuple(self._rng.integers(60, 200, 3).tolist())
            if self._rng.random() < 0.5:
                self.polygon(corners, fill=color)
            else:
                self.line(np.concatenate([corners, corners[:1]]), color, 0.8)

    def image(self) -> Image.Image:
        """Return the sheet as a noisy scan."""
        reduced = self._image.resize((self.width, self.height), Image.Resampling.BOX)
        pixels = np.asarray(reduced, dtype=np.float64)
        pixels = pixels * self._rng.uniform(0.75, 1.0) + self._rng.normal(0, 6, pixels.shape)
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _steps(wall: _Rectangle) -> Iterator[_Points]:
    """Yield short strokes across a wall."""
    along = np.arange(2.0, max(wall.width, wall.height) - 2, 4.0)
    for at in along.tolist():
        if wall.width > wall.height:
            ends = (wall.left + at, wall.bottom), (wall.left + at + 2, wall.top)
        else:
            ends = (wall.left, wall.top + at + 2), (wall.right, wall.top + at)
        yield np.array(ends)
