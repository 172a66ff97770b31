"""Reads YOLO's text files: a row for each object, as shares of the image as it is displayed.

A row is a class and a box, a box with keypoints (`kpt_shape` in data.yaml), or the corners of a
polygon or an oriented box, as ultralytics reads it; without data.yaml, keypoints and corners may
look alike, which is refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from contract.errors import UserError
from training.workloads.detection.coco_faults import CocoFaults
from training.workloads.detection.image_files import upright_size

# Left, top, right, bottom, in pixels.
Corners: TypeAlias = tuple[float, float, float, float]
# Its classes, and the content of the YAML file that names them, if one does.
Yolo: TypeAlias = tuple[list[str], Mapping[str, Any] | None]
_Row: TypeAlias = tuple[str, list[str]]  # where it is, and its words

# Coordinates may pass the border by this share, as ultralytics permits.
_BEYOND = 0.01
# Of a keypoint. 0: not labelled, 1: hidden, 2: visible.
_VISIBILITY = re.compile(r"[012](\.0*)?")


class Marked(NamedTuple):
    """An object: its class's name, its corners, and by how many degrees it is rotated."""

    name: str
    corners: Corners
    rotation: float = 0.0


class Labelled(NamedTuple):
    """An image and its objects; height and width when they were drawn, and its split, if known."""

    image: Path
    objects: list[Marked]
    size: tuple[int, int] | None = None
    split: str | None = None


def yolo_of(folder: Path) -> Yolo:
    """Return YOLO's classes: `names` in a YAML file, or the lines of classes.txt or obj.names."""
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        if re.search(r"^names\s*:", path.read_text(encoding="utf-8"), re.MULTILINE):
            return _described(path)
    for path in sorted([*folder.rglob("classes.txt"), *folder.glob("*.names")]):
        return lines(path), None
    return [], None


def _described(path: Path) -> Yolo:
    # An image may lack it; the trainer itself never reads YAML.
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(f"reading {path} requires the package PyYAML; install it") from error
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    names = content["names"]
    if isinstance(names, dict):
        if sorted(names) != list(range(len(names))):
            raise UserError(f"{path} numbers its names {sorted(names)}; number them from 0")
        names = [names[number] for number in sorted(names)]
    if not isinstance(names, list) or not names:
        raise UserError(f"{path} has the names {names!r:.60}; provide a list of class names")
    return [str(name) for name in names], content


def read_yolo(
    folder: Path, images: Sequence[Path], yolo: Yolo, faults: CocoFaults
) -> Iterator[Labelled]:
    """Yield each image with its text file's boxes."""
    names, described = yolo
    shape = (described or {}).get("kpt_shape") or [0, 2]
    rows = {image: _rows(folder, image) for image in images}
    expected = f"{len(names)} classes and a box" + (f" of kpt_shape {shape}" if shape[0] else "")
    if not shape[0]:
        _refuse_unclear([row for own in rows.values() for row in own], described is not None)
    for image, own in rows.items():
        height, width = upright_size(image) or (1, 1)
        objects = []
        for where, (kind, *shares) in own:
            try:
                name = dict(enumerate(names))[int(kind)]
                corners = _corners([float(each) for each in shares], shape[0] * shape[1])
            except (ValueError, KeyError):
                row = " ".join([kind, *shares])
                faults.add("record", f"{where} is {row:.40}, not one of {expected}")
                continue
            left, top, right, bottom = corners
            sides = (left * width, top * height, right * width, bottom * height)
            objects.append(Marked(name, sides))
        yield Labelled(image, objects)


def _rows(folder: Path, image: Path) -> list[_Row]:
    """Return the rows of an image's text file; `labels` replaces `images` in its path."""
    parts = list(image.relative_to(folder).with_suffix(".txt").parts)
    places = [at for at, part in enumerate(parts[:-1]) if part == "images"]
    for at in places[-1:]:
        parts[at] = "labels"
    path = Path(*parts)
    return [
        (f"{path}, line {number},", line.split())
        for number, line in enumerate(lines(folder / path), 1)
    ]


def _corners(shares: Sequence[float], of_keypoints: int) -> Corners:
    """Return the corners of a box (centre, size) or of a polygon's extent, as image shares."""
    if len(shares) in (4, 4 + of_keypoints):
        x, y, width, height = shares[:4]
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    is_inside = min(shares, default=-1) >= -_BEYOND and max(shares) <= 1 + _BEYOND
    if of_keypoints or len(shares) < 6 or len(shares) % 2 or not is_inside:
        raise ValueError(shares)
    return min(shares[::2]), min(shares[1::2]), max(shares[::2]), max(shares[1::2])


def _refuse_unclear(rows: Sequence[_Row], is_described: bool) -> None:
    """Refuse rows that may be a polygon's corners, or a box with keypoints.

    Keypoints are equally many in each row, and polygons rarely. data.yaml decides, unless every
    third number is a visibility.
    """
    long = [(where, words) for where, words in rows if len(words) > 6]
    if len({len(words) for _, words in long}) != 1:
        return
    where, count = long[0][0], len(long[0][1]) - 1
    is_of_three = count % 3 == 1 and all(
        _VISIBILITY.fullmatch(word) for _, words in long for word in words[7::3]
    )
    if is_of_three or not (is_described or count % 2):
        many, each = (count // 3 - 1, 3) if is_of_three else (count // 2 - 2, 2)
        raise UserError(
            f"{where} has {count} numbers after its class, as have all such rows: a polygon's "
            f"corners, or a box with {many} keypoints of {each} numbers; name kpt_shape in a "
            "data.yaml for keypoints, or provide one without it for corners"
        )


def lines(path: Path) -> list[str]:
    """Return a text file's lines that are not empty; none if there is no file."""
    if not path.is_file():
        return []
    return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
