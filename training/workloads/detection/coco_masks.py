"""The extent of a segmentation, for annotations that have a mask and no box.

Polygons, and run-length encodings as COCO writes them: lists of runs, or text. The runs go down the
columns, background first. Masks themselves are never drawn.
"""

from typing import Any, NamedTuple

import numpy as np

from training.workloads.detection.coco_faults import finite


class Extent(NamedTuple):
    """The smallest box around a mask, in pixels, and the mask's area."""

    x: float
    y: float
    width: float
    height: float
    area: float


def extent_of(segmentation: Any) -> Extent | None:
    """The extent of a COCO segmentation; None if it is none, or empty."""
    if isinstance(segmentation, dict):
        return _of_runs(segmentation.get("counts"), segmentation.get("size"))
    if isinstance(segmentation, list) and segmentation:
        return _of_polygons(segmentation)
    return None


def _of_polygons(polygons: list[Any]) -> Extent | None:
    points, area = [], 0.0
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) % 2 or len(polygon) < 6:
            return None
        numbers = [finite(number) for number in polygon]
        if None in numbers:
            return None
        own = np.asarray(numbers, dtype=np.float64).reshape(-1, 2)
        after = np.roll(own, -1, axis=0)
        area += abs(float((own[:, 0] * after[:, 1] - own[:, 1] * after[:, 0]).sum())) / 2
        points.append(own)
    every = np.concatenate(points)
    (x, y), (right, bottom) = every.min(axis=0).tolist(), every.max(axis=0).tolist()
    return Extent(x=x, y=y, width=right - x, height=bottom - y, area=area)


def _of_runs(counts: Any, size: Any) -> Extent | None:
    try:
        height, width = (int(number) for number in size)
        runs = np.asarray(_decoded(counts) if isinstance(counts, str) else counts, dtype=np.int64)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if runs.ndim != 1 or not len(runs) or runs.min() < 0 or runs.sum() != height * width:
        return None
    bounds = runs.cumsum()
    first, end = bounds[:-1:2], bounds[1::2]
    first, end = first[end > first], end[end > first]
    if not len(first):
        return None
    left, right = first // height, (end - 1) // height
    if (left != right).any():  # A run from one column into the next touches both borders.
        top, bottom = 0, height - 1
    else:
        top, bottom = int((first % height).min()), int(((end - 1) % height).max())
    x = int(left.min())
    return Extent(
        x=float(x),
        y=float(top),
        width=float(int(right.max()) - x + 1),
        height=float(bottom - top + 1),
        area=float((end - first).sum()),
    )


def _decoded(text: str) -> list[int]:
    """The runs in COCO's text: 5 bits a character, lowest first, the third on as differences."""
    runs: list[int] = []
    number = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise ValueError(character)
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:  # negative
            number -= 1 << shift
        runs.append(number + (runs[-2] if len(runs) > 2 else 0))
        number = shift = 0
    if shift:
        raise ValueError(text)
    return runs
