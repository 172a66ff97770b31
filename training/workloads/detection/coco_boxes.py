"""The box of one annotation in COCO's format.

A box that is left out is taken from the mask, an area from mask or box; both are noted. Masks are
polygons, or run-length encodings as COCO writes them: lists of runs or text, down the columns,
background first. They are never drawn.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from training.workloads.detection.coco_faults import CocoFaults, finite

# An area may be larger than its box by this factor: it is rounded, too.
_AREA_ROUNDING = 1.01


class Extent(NamedTuple):
    """The smallest box around a mask, in pixels, and the mask's area."""

    x: float
    y: float
    width: float
    height: float
    area: float


class Box(NamedTuple):
    """An object of an image, as annotated."""

    image_id: int
    category_id: int
    xywh: tuple[float, float, float, float]
    area: float
    is_crowd: bool


def box_of(
    record: Mapping[str, Any], image_id: int, category_id: int, where: str, faults: CocoFaults
) -> Box | None:
    """The annotation's object; None, and a fault noted, if it has no usable one."""
    extent = None
    if not record.get("bbox") or record.get("area") is None:
        extent = extent_of(record.get("segmentation"))
    xywh = _xywh(record, extent, where, faults)
    if xywh is None:
        return None
    _, _, width, height = xywh
    if width < 0 or height < 0:
        faults.add("box-size", f"{where} has the box {shown(xywh)}, of negative size")
        return None
    area = _area(record, extent, width * height, where, faults)
    crowd = record.get("iscrowd", 0)
    if crowd not in (0, 1):
        faults.add("crowd", f"{where} has iscrowd {crowd!r:.20}")
        return None
    if area is None:
        return None
    return Box(image_id, category_id, xywh, area, bool(crowd))


def _xywh(
    record: Mapping[str, Any], extent: Extent | None, where: str, faults: CocoFaults
) -> tuple[float, float, float, float] | None:
    given = record.get("bbox")
    if not given:
        if extent is not None:
            faults.add("derived-box", f"{where} has no bbox")
            return extent[:4]
        if record.get("segmentation"):
            faults.add("mask", f"{where} has no bbox, and a mask that cannot be read")
        else:
            faults.add("box", f"{where} has neither bbox nor mask")
        return None
    numbers = [finite(number) for number in given] if isinstance(given, list) else []
    match numbers:
        case [float() as x, float() as y, float() as width, float() as height]:
            return x, y, width, height
    faults.add("box", f"{where} has the box {given!r:.60}")
    return None


def _area(
    record: Mapping[str, Any],
    extent: Extent | None,
    box_area: float,
    where: str,
    faults: CocoFaults,
) -> float | None:
    given = record.get("area")
    if given is None:
        faults.add("derived-area", f"{where} has no area")
        return extent.area if extent is not None else box_area
    area = finite(given)
    if area is None or area < 0:
        faults.add("area", f"{where} has the area {given!r:.40}")
        return None
    if area > box_area * _AREA_ROUNDING + 1:
        faults.add("area-larger", f"{where} has the area {area:g}, more than its box {box_area:g}")
    return area


def shown(xywh: Any) -> str:
    """A box as people read it."""
    return f"[{', '.join(f'{float(number):g}' for number in xywh)}]"


def extent_of(segmentation: Any) -> Extent | None:
    """The extent of a COCO segmentation; None if it is invalid or empty."""
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
