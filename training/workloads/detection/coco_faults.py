"""The rules by which a dataset in COCO's format is checked, the faults found, and box parsing.

Whatever would break training or make its figures wrong is refused; the rest is a warning. A missing
box is derived from the mask, a missing area from mask or box; both are noted. Masks are polygons or
COCO's run-length encodings (lists or text, down the columns); they are never drawn.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from contract.errors import UserError
from training.durable import DataFinding, DataReport

# Rule -> what to do.
_RULES = tomllib.loads(Path(__file__).with_name("coco_rules.toml").read_text(encoding="utf-8"))
_REFUSED: Mapping[str, str] = _RULES["refused"]
_WARNED: Mapping[str, str] = _RULES["warned"]

# At most 64 bits, in one notation only.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


class CocoFaults:
    """A collection of faults by rule: their number, and the first of each as an example."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, rule: str, text: str) -> None:
        """Note one fault: where and what, without what to do."""
        assert rule in _REFUSED or rule in _WARNED, rule
        # A file name may be any bytes, and JSON may hold half a character: neither can be printed.
        printable = text.encode(errors="backslashreplace").decode()
        self._found.setdefault(rule, []).append(printable)

    def include(self, others: "CocoFaults") -> None:
        """Note the faults of another collection too."""
        for rule, found in others._found.items():
            self._found.setdefault(rule, []).extend(found)

    @property
    def is_refused(self) -> bool:
        """Whether anything would break training."""
        return not _REFUSED.keys().isdisjoint(self._found)

    def findings(self) -> list[DataFinding]:
        """Return one finding for each broken rule, refusals first."""
        return [
            DataFinding(
                rule=rule,
                is_refused=rules is _REFUSED,
                count=len(found),
                message=f"{found[0]}{_more(len(found) - 1)}; {rules[rule]}",
            )
            for rules in (_REFUSED, _WARNED)
            for rule in rules
            if (found := self._found.get(rule))
        ]

    def refuse(self) -> None:
        """Raise UserError if anything would break training."""
        DataReport(findings=self.findings(), tables={}).refuse()


def _more(count: int) -> str:
    return f" (and {count:,} more)" if count else ""


def exact_id(value: object) -> int | None:
    """Return an id as an integer if it is one, as in 7, 7.0 and "7", but not "007" or 7.5."""
    if type(value) is int:  # as nearly all are
        return value if -(2**63) <= value < 2**63 else None
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return exact_id(int(value))
    # Above 2^53, a float does not determine the integer.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2.0**53:
        return int(value)
    return None


def is_text(value: object) -> TypeGuard[str]:
    """Return whether it is a valid string: JSON may hold half a character, as in "\\ud83d"."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _finite(value: object) -> float | None:
    """Return a finite float, or None."""
    if type(value) is int and abs(value) < 2**1000:
        value = float(value)
    return value if isinstance(value, float) and math.isfinite(value) else None


def refuse_layout(text: str) -> UserError:
    """Return the refusal of a folder in which nothing can be found."""
    return UserError(f"{text}; {_REFUSED['layout']}")


# An area may exceed its box by this factor, because both are rounded.
_AREA_ROUNDING = 1.01


class _Extent(NamedTuple):
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
    """Return the annotation's object; None, and a fault noted, if there is no usable one."""
    extent = None
    rotation = _rotation(record)
    if not record.get("bbox") or record.get("area") is None or rotation:
        extent = _extent_of(record.get("segmentation"))
    xywh = _xywh(record, extent, where, faults)
    if xywh is None:
        return None
    if min(xywh[2:]) < 0:
        faults.add("box-size", f"{where} has the box {shown(xywh)}, of negative size")
        return None
    if rotation and record.get("bbox"):
        faults.add("rotated-box", f"{where} is rotated by {rotation:g} degrees")
        xywh = _rotated(xywh, rotation, extent)
    area = _area(record, extent, xywh[2] * xywh[3], where, faults)
    crowd = record.get("iscrowd", 0)
    if crowd not in (0, 1):
        faults.add("crowd", f"{where} has iscrowd {crowd!r:.20}")
        return None
    if area is None:
        return None
    return Box(image_id, category_id, xywh, area, bool(crowd))


def _xywh(
    record: Mapping[str, Any], extent: _Extent | None, where: str, faults: CocoFaults
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
    numbers = [_finite(number) for number in given] if isinstance(given, list) else []
    match numbers:
        case [float() as x, float() as y, float() as width, float() as height]:
            return x, y, width, height
    faults.add("box", f"{where} has the box {given!r:.60}")
    return None


def _rotation(record: Mapping[str, Any]) -> float:
    """Return by how many degrees a box is rotated about its centre, as CVAT exports it."""
    attributes = record.get("attributes")
    given = attributes.get("rotation") if isinstance(attributes, dict) else None
    degrees = (_finite(given) or 0.0) % 360
    return degrees if degrees % 180 else 0.0


def _rotated(
    xywh: tuple[float, float, float, float], degrees: float, extent: _Extent | None
) -> tuple[float, float, float, float]:
    """Return the extent of a rotated box: that of its mask, unless this is the box unrotated."""
    x, y, width, height = xywh
    if extent is not None and extent.area < 0.99 * width * height:
        return extent[:4]
    cos, sin = (abs(of(math.radians(degrees))) for of in (math.cos, math.sin))
    wide, high = width * cos + height * sin, width * sin + height * cos
    return x + (width - wide) / 2, y + (height - high) / 2, wide, high


def _area(
    record: Mapping[str, Any],
    extent: _Extent | None,
    box_area: float,
    where: str,
    faults: CocoFaults,
) -> float | None:
    given = record.get("area")
    if given is None:
        faults.add("derived-area", f"{where} has no area")
        return extent.area if extent is not None else box_area
    area = _finite(given)
    if area is None or area < 0:
        faults.add("area", f"{where} has the area {given!r:.40}")
        return None
    if area > box_area * _AREA_ROUNDING + 1:
        faults.add("area-larger", f"{where} has the area {area:g}, more than its box {box_area:g}")
    return area


def shown(xywh: Any) -> str:
    """Return a box as readable text."""
    return f"[{', '.join(f'{float(number):g}' for number in xywh)}]"


def _extent_of(segmentation: Any) -> _Extent | None:
    """Return the extent of a COCO segmentation; None if it is invalid or empty."""
    if isinstance(segmentation, dict):
        return _of_runs(segmentation.get("counts"), segmentation.get("size"))
    if isinstance(segmentation, list) and segmentation:
        return _of_polygons(segmentation)
    return None


def _of_polygons(polygons: list[Any]) -> _Extent | None:
    points, area = [], 0.0
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) % 2 or len(polygon) < 6:
            return None
        numbers = [_finite(number) for number in polygon]
        if None in numbers:
            return None
        own = np.asarray(numbers, dtype=np.float64).reshape(-1, 2)
        after = np.roll(own, -1, axis=0)
        area += abs(float((own[:, 0] * after[:, 1] - own[:, 1] * after[:, 0]).sum())) / 2
        points.append(own)
    every = np.concatenate(points)
    (x, y), (right, bottom) = every.min(axis=0).tolist(), every.max(axis=0).tolist()
    return _Extent(x=x, y=y, width=right - x, height=bottom - y, area=area)


def _of_runs(counts: Any, size: Any) -> _Extent | None:
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
    return _Extent(
        x=float(x),
        y=float(top),
        width=float(int(right.max()) - x + 1),
        height=float(bottom - top + 1),
        area=float((end - first).sum()),
    )


def _decoded(text: str) -> list[int]:
    """Decode COCO's text: 5 bits a character, lowest first; from the third run on, differences."""
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
