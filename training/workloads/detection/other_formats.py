"""Converts annotations in other formats, recognized by their files, to COCO's three lists.

YOLO, Pascal VOC, LabelMe, KITTI, CVAT's XML, Create ML and TensorFlow's CSV. What a detector does
not learn is left out: points and lines, with a warning, and KITTI's DontCare. Everything else is
checked like COCO's annotations.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from xml.etree import ElementTree

from training.errors import UserError
from training.workloads.detection.coco_faults import CocoFaults
from training.workloads.detection.image_files import IMAGE_SUFFIXES, upright_size

# Left, top, right, bottom, in pixels.
_Corners: TypeAlias = tuple[float, float, float, float]


# An image's file name, and the names and corners of its objects.
_Read: TypeAlias = tuple[str, list[tuple[str, _Corners]]]


class _Labelled(NamedTuple):
    """An image and its objects: class names with corners."""

    image: Path
    objects: Sequence[tuple[str, _Corners]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Converted:
    """Images and objects of one split, as COCO lists them; ids count from 1."""

    root: Path
    images: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, labelled: _Labelled, ids: Mapping[str, int]) -> None:
        number = len(self.images) + 1
        name = labelled.image.relative_to(self.root).as_posix()
        self.images.append({"id": number, "file_name": name})
        height, width = upright_size(labelled.image) or (1, 1)
        self.images[-1] |= {"width": width, "height": height}
        for kind, (left, top, right, bottom) in labelled.objects:
            box = [left, top, right - left, bottom - top]
            self.annotations.append(
                {
                    "id": len(self.annotations) + 1,
                    "image_id": number,
                    "category_id": ids[kind],
                    "bbox": box,
                    "area": box[2] * box[3],
                }
            )


def convert(
    folder: Path, split_of: Callable[[str], str | None], faults: CocoFaults
) -> dict[str, dict[str, Any]] | None:
    """Return COCO's lists by split ("" if none is named); None for a folder of no known format.

    YOLO's classes keep their order; those of the other formats are sorted by name.
    """
    names = _yolo_names(folder)
    found = list(_yolo(folder, names, faults)) if names else []
    if not any(each.objects for each in found):  # a list of names alone does not make it YOLO's
        names, found = [], list(_by_file(folder, faults)) or found
    if not found:
        return None
    kinds = names or sorted({kind for each in found for kind, _ in each.objects})
    ids = {kind: number for number, kind in enumerate(kinds, 1)}
    listed = _lists(folder, split_of)
    splits: dict[str, _Converted] = {}
    for each in found:
        parents = each.image.relative_to(folder).parts[:-1]
        named = [split for part in parents if (split := split_of(part))]
        by_path = listed.get(f"{each.image.parent.name}/{each.image.name}")
        split = by_path or listed.get(each.image.stem) or (named[-1] if named else "")
        splits.setdefault(split, _Converted(root=folder)).add(each, ids)
    categories = [{"id": number, "name": kind} for kind, number in ids.items()]
    return {
        split: {"images": of.images, "annotations": of.annotations, "categories": categories}
        for split, of in splits.items()
    }


def _by_file(folder: Path, faults: CocoFaults) -> Iterator[_Labelled]:
    """Yield the images of all XML, JSON, CSV and text files that a reader understands."""
    images = {path.name: path for path in _images(folder)}
    stems = {path.stem: path for path in images.values()}
    readers: Mapping[str, Callable[[Path, CocoFaults], Sequence[_Read]]] = {
        ".xml": _xml,
        ".json": _json,
        ".csv": _tensorflow,
        ".txt": _kitti,
    }
    for path in sorted(folder.rglob("*")):
        if path.suffix not in readers or path.name.startswith("."):
            continue
        try:
            read = readers[path.suffix](path, faults)
        except (ValueError, KeyError, TypeError, AttributeError, ElementTree.ParseError) as error:
            faults.add("record", f"{path.relative_to(folder)} cannot be read: {error}")
            continue
        for image, objects in read:
            # Look next to the file first, because names repeat across folders.
            beside = path.parent / image
            own = beside if image and beside.is_file() else images.get(Path(image).name)
            if own := own or (stems.get(path.stem) if len(read) == 1 else None):
                yield _Labelled(own, objects)
            else:
                faults.add("missing-file", f"{path.relative_to(folder)} names the image {image!r}")


def _images(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in IMAGE_SUFFIXES]


def _xml(path: Path, faults: CocoFaults) -> Sequence[_Read]:
    """Read VOC's XML, about one image, or CVAT's, about all."""
    root = ElementTree.parse(path).getroot()
    if root.tag == "annotation":
        return [(root.findtext("filename") or "", [_voc(each) for each in root.iter("object")])]
    if root.tag != "annotations":
        return []
    return [
        # An image's subset is also its folder.
        ("/".join(filter(None, [image.get("subset"), image.get("name")])), _cvat(image, faults))
        for image in root.iter("image")
    ]


def _voc(each: ElementTree.Element) -> tuple[str, _Corners]:
    box = each.find("bndbox")
    if box is None:
        raise ValueError(f"an object of {each.findtext('name')!r} has no bndbox")
    left, top, right, bottom = (
        float(box.findtext(side) or "nan") for side in ("xmin", "ymin", "xmax", "ymax")
    )
    # VOC counts pixels from 1 and includes the last in the box.
    return each.findtext("name") or "", (left - 1, top - 1, right, bottom)


def _cvat(image: ElementTree.Element, faults: CocoFaults) -> list[tuple[str, _Corners]]:
    objects = []
    for each in image:
        label = each.get("label") or ""
        if each.tag == "box":
            left, top, right, bottom = (float(each.attrib[s]) for s in ("xtl", "ytl", "xbr", "ybr"))
            objects.append((label, (left, top, right, bottom)))
        elif each.tag == "polygon":
            points = [point.split(",") for point in each.attrib["points"].split(";")]
            objects.append((label, _extent([[float(x), float(y)] for x, y in points])))
        elif label:
            faults.add("other-shape", f"{image.get('name')} has a {each.tag} of {label!r}")
    return objects


def _extent(points: Sequence[Sequence[float]]) -> _Corners:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return min(xs), min(ys), max(xs), max(ys)


def _json(path: Path, faults: CocoFaults) -> Sequence[_Read]:
    """Read LabelMe's JSON, about one image, or Create ML's, about all."""
    content = json.loads(path.read_bytes())
    if isinstance(content, dict) and "shapes" in content:
        return [_labelme(path, content, faults)]
    if not isinstance(content, list):
        return []
    read: list[_Read] = []
    for image in content:
        objects = []
        for each in image["annotations"]:
            x, y, w, h = (float(each["coordinates"][n]) for n in ("x", "y", "width", "height"))
            corners = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
            objects.append((str(each["label"]), corners))
        read.append((str(image["image"]), objects))
    return read


def _labelme(path: Path, content: Mapping[str, Any], faults: CocoFaults) -> _Read:
    objects = []
    for shape in content["shapes"]:
        points = [(float(x), float(y)) for x, y in shape["points"]]
        kind = shape.get("shape_type") or "polygon"
        if kind == "circle":
            (x, y), end = points
            radius = math.hypot(end[0] - x, end[1] - y)
            points = [(x - radius, y - radius), (x + radius, y + radius)]
        elif kind not in ("polygon", "rectangle"):
            faults.add("other-shape", f"{path.name} has a {kind} of {shape['label']!r}")
            continue
        objects.append((str(shape["label"]), _extent(points)))
    return Path(str(content["imagePath"]).replace("\\", "/")).name, objects


def _tensorflow(path: Path, _: CocoFaults) -> Sequence[_Read]:
    """Read TensorFlow's CSV: a row per box."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("filename", "class", "xmin", "ymin", "xmax", "ymax")
    if not rows or not set(columns) <= rows[0].keys():
        return []
    images: dict[str, list[tuple[str, _Corners]]] = {}
    for row in rows:
        name, kind, *sides = (row[column] for column in columns)
        left, top, right, bottom = map(float, sides)
        images.setdefault(name, []).append((kind, (left, top, right, bottom)))
    return list(images.items())


def _kitti(path: Path, _: CocoFaults) -> Sequence[_Read]:
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows or any(len(row) not in (15, 16) for row in rows):
        return []
    objects = []
    for kind, *numbers in rows:
        left, top, right, bottom = map(float, numbers[3:7])
        if kind != "DontCare":
            objects.append((kind, (left, top, right, bottom)))
    return [(f"{path.stem}.png", objects)]


def _lists(folder: Path, split_of: Callable[[str], str | None]) -> dict[str, str]:
    """Map images to splits: by stem from VOC's ImageSets/Main, by path from YOLO's lists."""
    found = {}
    for path in sorted([*folder.rglob("ImageSets/Main/*.txt"), *folder.glob("*.txt")]):
        split = split_of(path.stem)
        if split is None or path.stem == "trainval":
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            is_path = path.parent == folder and Path(line).suffix.lower() in IMAGE_SUFFIXES
            if is_path:
                found["/".join(Path(line).parts[-2:])] = split
            elif path.parent != folder and line.strip():
                found[line.split()[0]] = split
    return found


def _yolo_names(folder: Path) -> list[str]:
    """Return YOLO's classes: `names` in a YAML file, or the lines of classes.txt or obj.names."""
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        if re.search(r"^names\s*:", path.read_text(encoding="utf-8"), re.MULTILINE):
            return _names_in(path)
    for path in sorted([*folder.rglob("classes.txt"), *folder.glob("*.names")]):
        return _lines(path)
    return []


def _names_in(path: Path) -> list[str]:
    # An image may lack it; the trainer itself never reads YAML.
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(f"reading {path} requires the package PyYAML; install it") from error
    try:
        names = yaml.safe_load(path.read_text(encoding="utf-8"))["names"]
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if isinstance(names, dict):
        if sorted(names) != list(range(len(names))):
            raise UserError(f"{path} numbers its names {sorted(names)}; number them from 0")
        names = [names[number] for number in sorted(names)]
    if not isinstance(names, list) or not names:
        raise UserError(f"{path} has the names {names!r:.60}; provide a list of class names")
    return [str(name) for name in names]


def _yolo(folder: Path, names: Sequence[str], faults: CocoFaults) -> Iterator[_Labelled]:
    """Yield each image with its text file's boxes; `labels` replaces `images` in the path."""
    for image in _images(folder):
        parts = list(image.relative_to(folder).with_suffix(".txt").parts)
        places = [at for at, part in enumerate(parts[:-1]) if part == "images"]
        for at in places[-1:]:
            parts[at] = "labels"
        path = folder.joinpath(*parts)
        height, width = upright_size(image) or (1, 1)
        objects = []
        for number, line in enumerate(_lines(path), 1):
            where = f"{path.relative_to(folder)}, line {number},"
            try:
                kind, *shares = line.split()
                name, corners = names[int(kind)], _of_shares([float(each) for each in shares])
            except (ValueError, IndexError):
                faults.add(
                    "record", f"{where} is {line:.40}, not one of {len(names)} classes and a box"
                )
                continue
            left, top, right, bottom = corners
            objects.append((name, (left * width, top * height, right * width, bottom * height)))
        yield _Labelled(image, objects)


def _of_shares(shares: Sequence[float]) -> _Corners:
    """Return the corners of a box (centre, size) or of a polygon's extent, as image shares."""
    if len(shares) == 4:
        x, y, width, height = shares
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    if len(shares) < 6 or len(shares) % 2:
        raise ValueError(shares)
    return min(shares[::2]), min(shares[1::2]), max(shares[::2]), max(shares[1::2])


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []  # an image without objects
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
