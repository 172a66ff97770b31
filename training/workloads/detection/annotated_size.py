"""Brings boxes to the pixels that are read: scaled to the image's size, and turned upright with it.

Tools write the size on which boxes were drawn. Where it is another one than the image has now, or
that of the pixels before EXIF turns them, it says what to do; if it fits neither, it is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from training.workloads.detection.coco import CocoSplit
from training.workloads.detection.coco_faults import CocoFaults
from training.workloads.detection.image_files import UPRIGHT, StoredSize

_Size: TypeAlias = tuple[int, int]  # width, height
_Boxes: TypeAlias = npt.NDArray[np.float64]

# A resized image's sides are rounded.
_ROUNDING_PIXELS = 1.0
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
        ends_N2 = boxes[own, :2] + boxes[own, 2:] - _ROUNDING_PIXELS
        # A box beyond the annotated size, but not beyond the image, was not drawn on that size.
        if (ends_N2 > annotated).any() and (ends_N2 <= image.upright).all():
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
