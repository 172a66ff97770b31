"""The box of one annotation in COCO's format.

A box that is left out is taken from the mask, an area from mask or box; both are noted.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from training.workloads.detection.coco_faults import Faults, finite
from training.workloads.detection.coco_masks import Extent, extent_of

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


def shown(xywh: Any) -> str:
    """A box as people read it."""
    return f"[{', '.join(f'{float(number):g}' for number in xywh)}]"
