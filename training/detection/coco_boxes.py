"""The box of one annotation in COCO's format, and what can be wrong with boxes.

A box that is left out is taken from the mask, an area from mask or box; both are noted.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from training.detection.coco_faults import Faults, finite
from training.detection.coco_masks import Extent, extent_of

if TYPE_CHECKING:
    from training.detection.coco import CocoSplit

_Array: TypeAlias = npt.NDArray[Any]

# Boxes may pass the border by this much without a word: tools round to pixels.
_ROUNDING_PIXELS = 1.0
# An area may be larger than its box by this factor: it is rounded, too.
_AREA_ROUNDING = 1.01


class Box(NamedTuple):
    """An object of an image, as annotated."""

    image_id: int
    category_id: int
    xywh: tuple[float, float, float, float]
    area: float
    is_crowd: bool


def box_of(
    record: Mapping[str, Any], image_id: int, category_id: int, where: str, faults: Faults
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
        faults.add("box-size", f"{where} has the box {_shown(xywh)}, of negative size")
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
    record: Mapping[str, Any], extent: Extent | None, where: str, faults: Faults
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
    record: Mapping[str, Any], extent: Extent | None, box_area: float, where: str, faults: Faults
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


def check_boxes(split: "CocoSplit", faults: Faults) -> None:
    """Note boxes that do not lie in their images, that are empty, or that are there twice."""
    of_image = np.repeat(np.arange(len(split)), split.objects_per_image)
    for rule, those, what in _strange(split, of_image):
        for number in np.flatnonzero(those).tolist():
            height, width = split.sizes[of_image[number]].tolist()
            where = f"{split.name}: {split.files[of_image[number]]} ({width}x{height})"
            faults.add(rule, f"{where} has the box {_shown(split.boxes[number])}, {what}")


def _strange(split: "CocoSplit", of_image: _Array) -> Iterator[tuple[str, _Array, str]]:
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


def _shown(xywh: Any) -> str:
    return f"[{', '.join(f'{float(number):g}' for number in xywh)}]"
