"""Checks a dataset in COCO's format before training costs anything; corrects nothing.

python -m training data check --workload detection DIR [--json]

Brings boxes to the pixels that are read: scaled to the image's size, and turned upright with it.

Tools write the size on which boxes were drawn. Where it is another one than the image has now, or
that of the pixels before EXIF turns them, it says what to do; if it fits neither, it is refused.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from training.durable import DataReport
from training.workloads.detection.coco import (
    UNDIVIDED,
    Category,
    CocoSplit,
    Source,
    divided_by_folder,
    find_images,
    find_sources,
    read_split,
    split_of,
    unlisted_images,
)
from training.workloads.detection.coco_faults import CocoFaults, shown
from training.workloads.detection.image_files import (
    UPRIGHT,
    ImageFault,
    StoredSize,
    examine,
    is_file,
)

if TYPE_CHECKING:
    # It imports torch.
    from training import Progress

# The published recipe's denoising queries: with more objects than this, there is only one group.
_DENOISING_QUERIES = 100
# If more than this share of a split's images is also in another split, its figures are wrong.
_MAX_LEAK_SHARE = 0.01
# Boxes may cross the border by this much without a warning, because tools round to pixels.
_ROUNDING_PIXELS = 1.0

_Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A folder in COCO's format, as far as it could be read, with every image's checksum."""

    folder: Path
    splits: Sequence[CocoSplit]
    digests: Mapping[str, Sequence[str | None]]  # None: the file does not exist
    faults: CocoFaults

    @property
    def report(self) -> DataReport:
        """The findings, for people and programs."""
        tables: dict[str, Sequence[Mapping[str, Any]]] = {}
        if self.splits:
            tables = {"splits": _split_rows(self.splits), "classes": _class_rows(self.splits)}
        return DataReport(findings=self.faults.findings(), tables=tables)


def check(folder: Path, progress: "Progress") -> Checked:
    """Check annotations, image files and overlaps between the splits."""
    faults = CocoFaults()
    root, sources = find_sources(folder, faults)
    read = [_read(root, source, faults) for source in sources]
    splits = [part for split in read if split for part in divided_by_folder(root, split, faults)]
    if not faults.is_refused:  # otherwise refused records would seem to be missing
        _check_categories(splits, faults)
        _check_unlisted(root, splits, faults)
    check_annotations(splits, faults)
    digests, stored = _check_images(splits, faults, progress)
    splits = [as_read(split, stored[split.name], faults) for split in splits]
    _check_duplicates(splits, digests, faults)
    return Checked(folder=root, splits=splits, digests=digests, faults=faults)


def _read(root: Path, source: Source, faults: CocoFaults) -> CocoSplit | None:
    if source.content is not None:
        split = split_of(source.content, source.split, lambda _: (root, {}), faults)
        return None if split is None else replace(split, is_converted=True)
    return read_split(source.path, source.split, partial(find_images, root, source, faults), faults)


def check_annotations(splits: Sequence[CocoSplit], faults: CocoFaults) -> None:
    """Do the cheap checks, which need only the annotations."""
    for split in splits:
        _check_boxes(split, faults)
        # Refused records are not missing ones.
        if not split.can_be_learned.any() and not faults.is_refused:
            but = ", only crowds and empty boxes" if len(split.labels) else ""
            faults.add("no-objects", f"{split.name} has no objects in its {len(split)} images{but}")
        most = int(split.objects_per_image.max())
        if most > _DENOISING_QUERIES:
            many = int((split.objects_per_image > _DENOISING_QUERIES).sum())
            image = split.files[int(split.objects_per_image.argmax())]
            text = f"{split.name} has {many} images of more than {_DENOISING_QUERIES} objects"
            faults.add("many-objects", f"{text}, {image} {most} of them")


def _check_categories(splits: Sequence[CocoSplit], faults: CocoFaults) -> None:
    """Check that categories are the same in every split and have objects."""
    first = splits[0]
    for split in splits[1:]:
        if split.categories != first.categories:
            ours, theirs = _differing(split.categories, first.categories)
            text = f"{split.name} has {ours}, and {first.name} {theirs}"
            faults.add("other-categories", text)
            return
    counts = {split.name: _objects_by_class(split) for split in splits}
    for label, (number, name) in enumerate(splits[0].categories):
        lacking = [split.name for split in splits if not counts[split.name][label]]
        if len(lacking) == len(splits):
            faults.add("unused-category", f"category {number} ({name}) has no objects")
        elif lacking and splits[0].can_be_learned.any():
            text = f"{' and '.join(lacking)} has no objects of category {number} ({name})"
            faults.add("class-not-in-split", text)


def _differing(ours: Sequence[Category], theirs: Sequence[Category]) -> tuple[str, str]:
    """Describe, for each of the two, the first category that the other lacks."""
    only = [sorted(set(a) - set(b))[:1] for a, b in ((ours, theirs), (theirs, ours))]
    shown = [f"category {c[0].id} {c[0].name!r}" if c else "no such category" for c in only]
    return shown[0], shown[1]


def _check_unlisted(root: Path, splits: Sequence[CocoSplit], faults: CocoFaults) -> None:
    listed = {split.folder / str(file) for split in splits for file in split.files}
    for path in unlisted_images(root, listed):
        faults.add("unlisted-image", f"{path.relative_to(root)} is in no annotation file")


def _check_images(
    splits: Sequence[CocoSplit], faults: CocoFaults, progress: "Progress"
) -> tuple[dict[str, list[str | None]], dict[str, list[StoredSize | None]]]:
    """Decode every image, in threads: Pillow releases the interpreter's lock."""
    done, total = 0, sum(map(len, splits))
    digests: dict[str, list[str | None]] = {}
    sizes: dict[str, list[StoredSize | None]] = {}
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for split in splits:
            examined = pool.map(partial(_examine, split), range(len(split)))
            digests[split.name], sizes[split.name] = [], []
            for index, (digest, size, found) in enumerate(examined):
                digests[split.name].append(digest)
                sizes[split.name].append(size)
                for fault in found:
                    faults.add(fault.rule, f"{split.name}: {split.files[index]} {fault.text}")
                done += 1
                progress(done, total)
    finally:
        # After Ctrl-C, the remaining images are skipped.
        pool.shutdown(cancel_futures=True)
    return digests, sizes


def _examine(
    split: CocoSplit, index: int
) -> tuple[str | None, StoredSize | None, list[ImageFault]]:
    path = split.folder / str(split.files[index])
    if not is_file(path):
        return None, None, [ImageFault("missing-file", f"is not in {split.folder}")]
    return examine(path)


def _check_duplicates(
    splits: Sequence[CocoSplit], digests: Mapping[str, Sequence[str | None]], faults: CocoFaults
) -> None:
    """Note files that are byte-for-byte equal."""
    places = {split.name: _places(split, digests[split.name]) for split in splits}
    for name, of_digest in places.items():
        for files in of_digest.values():
            if len(files) > 1:
                faults.add("duplicate-image", f"{name}: {files[0]} and {files[1]} are the same")
    for one, other in combinations(places, 2):
        shared = places[one].keys() & places[other].keys()
        share = len(shared) / max(1, len(places[other]))
        for digest in sorted(shared):
            text = f"{other}: {places[other][digest][0]} is also {places[one][digest][0]} in {one}"
            faults.add("leak" if share > _MAX_LEAK_SHARE else "few-leaks", text)


def _places(split: CocoSplit, digests: Sequence[str | None]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for file, digest in zip(split.files.tolist(), digests, strict=True):
        if digest is not None:
            found[digest].append(file)
    return found


def _objects_by_class(split: CocoSplit) -> "np.ndarray[Any, Any]":
    return np.bincount(split.labels[~split.crowds], minlength=len(split.categories))


def _split_rows(splits: Sequence[CocoSplit]) -> list[dict[str, Any]]:
    return [
        {
            "split": "undivided" if split.name == UNDIVIDED else split.name,
            "images": len(split),
            "without objects": int((split.objects_per_image == 0).sum()),
            "objects": len(split.labels) - int(split.crowds.sum()),
            "crowds": int(split.crowds.sum()),
            "most in an image": int(split.objects_per_image.max()),
            "largest image": "x".join(str(side) for side in split.sizes.max(axis=0)[::-1]),
        }
        for split in splits
    ]


def _class_rows(splits: Sequence[CocoSplit]) -> list[dict[str, Any]]:
    """Return each category's class in the model, and its objects by split and by size."""
    counts = {split.name: _objects_by_class(split) for split in splits}
    return [
        {
            "class": label,
            "category id": number,
            "name": name,
            **{f"in {split}": int(of_class[label]) for split, of_class in counts.items()},
            **_sizes(splits, label),
        }
        for label, (number, name) in enumerate(splits[0].categories)
        if all(len(split.categories) == len(splits[0].categories) for split in splits)
    ]


def _sizes(splits: Sequence[CocoSplit], label: int) -> dict[str, int]:
    """Count a class's objects by COCO's limits: up to 32x32 pixels, up to 96x96, larger."""
    areas = np.concatenate([s.areas[(s.labels == label) & ~s.crowds] for s in splits])
    bounds = np.searchsorted(np.sort(areas), (32.0**2, 96.0**2), side="right").tolist()
    return {"small": bounds[0], "medium": bounds[1] - bounds[0], "large": len(areas) - bounds[1]}


def _check_boxes(split: CocoSplit, faults: CocoFaults) -> None:
    """Note boxes that are not within their images, are empty or appear twice."""
    of_image = np.repeat(np.arange(len(split)), split.objects_per_image)
    for rule, those, what in _strange(split, of_image):
        for number in np.flatnonzero(those).tolist():
            height, width = split.sizes[of_image[number]].tolist()
            where = f"{split.name}: {split.files[of_image[number]]} ({width}x{height})"
            faults.add(rule, f"{where} has the box {shown(split.boxes[number])}, {what}")


def _strange(split: CocoSplit, of_image: _Array) -> Iterator[tuple[str, _Array, str]]:
    """Yield each rule with the objects that break it and the text about them."""
    if not len(split.boxes):
        return
    height, width = split.sizes[of_image].T.astype(np.float64)
    x, y, w, h = split.boxes.T
    passes = (x < -_ROUNDING_PIXELS) | (y < -_ROUNDING_PIXELS)
    passes |= (x + w > width + _ROUNDING_PIXELS) | (y + h > height + _ROUNDING_PIXELS)
    if 0 < split.boxes.max() <= 1.0:
        yield "box-relative", w >= 0, "and all others are as small"
        return
    fit_as_corners = (w > x) & (h > y) & (w <= width + 1) & (h <= height + 1)
    if passes.mean() > 0.1 and fit_as_corners.all() and not split.is_converted:
        yield "box-corners", passes, "which crosses its border, as many do"
        return
    empty = (w == 0) | (h == 0)
    outside = ((x >= width) | (y >= height) | (x + w <= 0) | (y + h <= 0)) & ~empty
    yield "box-outside", outside, "outside it"
    yield "clipped-box", passes & ~outside & ~empty, "which crosses its border"
    yield "empty-box", empty, "without width or height"
    rows = np.column_stack([of_image, split.labels, split.boxes])
    _, first, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
    again = np.zeros_like(empty)
    again[first[counts > 1]] = True
    yield "duplicate-annotation", again, "more than once in one category"


_Size: TypeAlias = tuple[int, int]  # width, height
_Boxes: TypeAlias = npt.NDArray[np.float64]

# A resized image's sides are rounded.
_MIRRORED, _UPSIDE_DOWN, _TRANSPOSED = (2, 3, 6, 7), (3, 4, 7, 8), (5, 6, 7, 8)


def as_read(split: CocoSplit, stored: Sequence[StoredSize | None], faults: CocoFaults) -> CocoSplit:
    """Return the split in the pixels of its images as they are read, which is upright."""
    sizes, boxes, areas = split.sizes.copy(), split.boxes.copy(), split.areas.copy()
    for index, image in enumerate(stored):
        if image is None:  # the check of the files reports why
            continue
        own, annotated = split.objects(index), (int(sizes[index, 1]), int(sizes[index, 0]))
        drawn_on, where = _drawn_on(annotated, image), f"{split.name}: {split.files[index]}"
        text = "has {}x{} pixels, but is annotated as {}x{}".format(*image.size, *annotated)
        centers_N2 = boxes[own, :2] + boxes[own, 2:] / 2
        # A box may overhang its image. If most of one is beyond the annotated size, but not beyond
        # the image, it was not drawn on that size.
        if (centers_N2 > annotated).any() and (centers_N2 <= image.upright).all():
            drawn_on, text = None, "is annotated as {}x{}, but has a box beyond".format(*annotated)
        if drawn_on is None:
            faults.add("image-size", f"{where} {text}")
            continue
        if image.orientation != UPRIGHT:
            rule = "upright" if image.size != image.upright else "orientation"
            if drawn_on != image.upright:
                rule = "label-studio" if split.is_of_label_studio else "turned-box"
            faults.add(rule, f"{where} is stored rotated (EXIF orientation {image.orientation})")
        if annotated != drawn_on:
            faults.add("scaled-box", f"{where} {text}")
        boxes[own] = _moved(boxes[own], annotated, image, drawn_on)
        areas[own] *= math.prod(image.upright) / math.prod(annotated)
        sizes[index] = image.upright[::-1]
    return replace(split, sizes=sizes, boxes=boxes, areas=areas)


def _drawn_on(annotated: _Size, image: StoredSize) -> _Size | None:
    """Return the size that the annotated one means, upright or as stored; None if neither."""
    of_image = (image.upright, image.size)
    if annotated in of_image:
        return annotated
    return next((size for size in of_image if _is_resized(annotated, size)), None)


def _is_resized(annotated: _Size, size: _Size) -> bool:
    """Return whether one factor leads from one size to the other."""
    pairs = list(zip(annotated, size, strict=True))
    least = max((side - _ROUNDING_PIXELS) / own for own, side in pairs)
    return least <= min((side + _ROUNDING_PIXELS) / own for own, side in pairs)


def _moved(boxes_N4: _Boxes, annotated: _Size, image: StoredSize, drawn_on: _Size) -> _Boxes:
    """Scale boxes (x, y, width, height), then turn them as EXIF turns the pixels."""
    across, down = drawn_on
    turn = UPRIGHT if drawn_on == image.upright else image.orientation
    x, y, w, h = (boxes_N4 * np.tile(np.divide(drawn_on, annotated), 2)).T
    if turn in _TRANSPOSED:
        x, y, w, h, across, down = y, x, h, w, down, across
    if turn in _MIRRORED:
        x = across - x - w
    if turn in _UPSIDE_DOWN:
        y = down - y - h
    return np.column_stack([x, y, w, h])
