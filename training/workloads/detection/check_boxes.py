"""What can be wrong with the boxes of a split: outside, empty, twice, or in another notation."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from training.workloads.detection.coco import CocoSplit
from training.workloads.detection.coco_boxes import shown
from training.workloads.detection.coco_faults import Faults

_Array: TypeAlias = npt.NDArray[Any]

# Boxes may pass the border by this much without a word: tools round to pixels.
_ROUNDING_PIXELS = 1.0


def check_boxes(split: CocoSplit, faults: Faults) -> None:
    """Note boxes that do not lie in their images, that are empty, or that are there twice."""
    of_image = np.repeat(np.arange(len(split)), split.objects_per_image)
    for rule, those, what in _strange(split, of_image):
        for number in np.flatnonzero(those).tolist():
            height, width = split.sizes[of_image[number]].tolist()
            where = f"{split.name}: {split.files[of_image[number]]} ({width}x{height})"
            faults.add(rule, f"{where} has the box {shown(split.boxes[number])}, {what}")


def _strange(split: CocoSplit, of_image: _Array) -> Iterator[tuple[str, _Array, str]]:
    """Rules, the objects that break each, and what to say of them."""
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
    if passes.mean() > 0.1 and fit_as_corners.all():
        yield "box-corners", passes, "which passes its border, as many do"
        return
    empty = (w == 0) | (h == 0)
    outside = ((x >= width) | (y >= height) | (x + w <= 0) | (y + h <= 0)) & ~empty
    yield "box-outside", outside, "outside of it"
    yield "clipped-box", passes & ~outside & ~empty, "which passes its border"
    yield "empty-box", empty, "of no width or height"
    rows = np.column_stack([of_image, split.labels, split.boxes])
    _, first, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
    again = np.zeros_like(empty)
    again[first[counts > 1]] = True
    yield "duplicate-annotation", again, "more than once in one category"
