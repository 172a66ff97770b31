"""Converts annotations in other formats, recognized by their files, to COCO's three lists.

YOLO, Pascal VOC, LabelMe, KITTI, CVAT's XML, Create ML and TensorFlow's CSV. What a detector does
not learn is left out: points and lines, with a warning. Everything else is checked like COCO's
annotations. Splits that a dataset names itself (data.yaml, YOLO's lists, VOC's ImageSets)
win over the names of folders.

Reads YOLO's text files: a row for each object, as shares of the image as it is displayed.

A row is a class and a box, a box with keypoints (`kpt_shape` in data.yaml), or the corners of a
polygon or an oriented box, as ultralytics reads it; without data.yaml, keypoints and corners may
look alike, which is refused.
"""

import csv
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple, TypeAlias
from xml.etree import ElementTree

from contract.errors import UserError
from training.durable import split_within
from training.workloads.detection.coco_faults import CocoFaults
from training.workloads.detection.image_files import IMAGE_SUFFIXES, upright_size

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


# In a list of ImageSets/Main about a class: whether an image shows it.
_SHOWS = re.compile(r"\s+-?[01]$")


def named_splits(
    folder: Path, images: Sequence[Path], described: Mapping[str, Any]
) -> dict[Path, str]:
    """Return the split of each image for which the content of data.yaml or a list names one."""
    known = defaultdict[str, list[Path]](list)  # by path, with and without suffix, and by folder
    for image in images:
        name = above = str(image.relative_to(folder))
        bare = name.rpartition(".")[0]
        keys = {name, bare, bare.rpartition("/")[2], "."}
        while above := above.rpartition("/")[0]:
            keys.add(above)
        for key in keys:
            known[key].append(image)
    found: dict[Path, str] = {}
    for split, by, base, places in _named(folder, described):
        for place in places:
            if (own := _located(place, base, known)) is None:
                if split == "test":  # Roboflow names one that its export does not hold
                    continue
                raise UserError(
                    f"{by} names {place!r} for {split}, where {folder} has no image; copy its "
                    f"images there, or remove it from {by}"
                )
            for image in known[own]:
                if (other := found.setdefault(image, split)) != split:
                    raise UserError(
                        f"{by} names {image.relative_to(folder)} for {split}, which is also named "
                        f"for {other}; name each image for one split"
                    )
    return found


def _named(
    folder: Path, described: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, Sequence[str]]]:
    """Yield a split, the file that names it, and its places with what they are relative to."""
    texts = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.txt"))}
    base, keys = str(described.get("path") or ""), ("train", "val", "validation", "valid", "test")
    given = {key: described[key] for key in keys if described.get(key)}
    if given.get("val") == given.get("train"):  # as in a tutorial, which holds nothing out
        given.pop("val", None)
    for key, value in given.items():
        for place in map(str, value if isinstance(value, list) else [value]):
            if (own := _located(place, base, texts)) is not None:
                yield split_within(key) or key, own, str(Path(own).parent), lines(texts[own])
            else:
                yield split_within(key) or key, "data.yaml", base, [place]
    for name, path in ({} if given else texts).items():
        if (split := split_within(path.stem)) and path.parent == folder:
            paths = [line for line in lines(path) if Path(line).suffix.lower() in IMAGE_SUFFIXES]
            yield split, name, "", paths
        elif split and path.match("ImageSets/Main/*"):
            inside = path.relative_to(folder).parents[2]
            yield split, name, f"{inside}/JPEGImages", [_SHOWS.sub("", x) for x in lines(path)]


def _located(place: str, base: str, known: Container[str]) -> str | None:
    """Return the longest end of a path that is known.

    What names a split stays in it, unless the path is absolute: valid/images is not images.
    """
    place = place.strip().replace("\\", "/")
    is_absolute = re.match(r"/|[A-Za-z]:", place) is not None
    joined = os.path.normpath(place if is_absolute else f"{base}/{place}")
    parts = [part for part in joined.split("/") if part not in ("", ".", "..")]
    for start in range(max(1, len(parts))):
        if (end := "/".join(parts[start:]) or ".") in known:
            dropped = {part for part in place.split("/") if split_within(part)} - {*end.split("/")}
            return end if is_absolute or not start or not dropped else None
    return None


# LabelMe's shapes with corners; the last is X-AnyLabeling's.
_OF_CORNERS = ("polygon", "rectangle", "oriented_rectangle", "rotation")


def convert(folder: Path, faults: CocoFaults) -> dict[str, dict[str, Any]] | None:
    """Return COCO's lists by split ("" if none is named); None for a folder of no known format.

    YOLO's classes keep their order; those of the other formats are sorted by name.
    """
    images = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in IMAGE_SUFFIXES]
    names, described = yolo = yolo_of(folder)
    found = list(read_yolo(folder, images, yolo, faults)) if names else []
    if not any(each.objects for each in found):  # a list of names alone does not make it YOLO's
        others = list(_by_file(folder, images, faults))
        names, found = ([], others) if others else (names, found)
    if not found:
        return None
    kinds = names or sorted({each.name for image in found for each in image.objects})
    named = named_splits(folder, images, described or {})
    # Then the check lists the others as not used.
    is_divided = {"train", "validation"} <= set(named.values())
    splits: dict[str, list[Labelled]] = {}
    for each in found:
        if each.image in named or not is_divided:
            by_folder = _by_folder(each.image.relative_to(folder))
            split = named.get(each.image) or each.split or by_folder or ""
            splits.setdefault(split, []).append(each)
    if set(splits) == {"train"}:  # which holds nothing out, so the import divides them
        splits = {"": splits["train"]}
    return {split: _as_coco(folder, of, kinds) for split, of in splits.items()}


def _as_coco(root: Path, found: Sequence[Labelled], kinds: Sequence[str]) -> dict[str, Any]:
    """List images and objects as COCO does; ids count from 1."""
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    ids = {kind: number for number, kind in enumerate(kinds, 1)}
    for number, each in enumerate(found, 1):
        height, width = each.size or upright_size(each.image) or (1, 1)
        name = each.image.relative_to(root).as_posix()
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        for kind, (left, top, right, bottom), rotation in each.objects:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": ids[kind],
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "attributes": {"rotation": rotation},
                }
            )
    categories = [{"id": number, "name": kind} for kind, number in ids.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def _by_folder(path: Path) -> str | None:
    """Return the split that the lowest of a path's folders names."""
    named = [split for part in path.parts[:-1] if (split := split_within(part))]
    return named[-1] if named else None


def _by_file(folder: Path, images: Sequence[Path], faults: CocoFaults) -> Iterator[Labelled]:
    """Yield the images of all XML, JSON, CSV and text files that a reader understands."""
    by_name = {path.name: path for path in images}
    stems = {path.stem: path for path in by_name.values()}
    found = list(_read_files(folder, faults))
    # train_labels.csv next to test_labels.csv, or XML in folders; one alone may have any name.
    own_splits = [
        (split_within(path.stem) if len(read) > 1 else None) or _by_folder(path.relative_to(folder))
        for path, read in found
    ]
    are_splits = len(set(own_splits) - {None}) > 1
    for (path, read), own_split in zip(found, own_splits, strict=True):
        for each in read:
            # Look next to the file first, because names repeat across folders.
            sibling = path.parent / each.image
            own = sibling if sibling.is_file() else by_name.get(each.image.name)
            if not (own := own or (stems.get(path.stem) if len(read) == 1 else None)):
                name = str(each.image)
                faults.add("missing-file", f"{path.relative_to(folder)} names the image {name!r}")
                continue
            split = split_within(each.split or "") or (own_split if are_splits else None)
            yield each._replace(image=own, split=split)


def _read_files(folder: Path, faults: CocoFaults) -> Iterator[tuple[Path, Sequence[Labelled]]]:
    readers = {".xml": _xml, ".json": _json, ".csv": _tensorflow, ".txt": _kitti}
    for path in sorted(folder.rglob("*")):
        if path.suffix not in readers or path.name.startswith("."):
            continue
        try:
            yield path, readers[path.suffix](path, faults)
        except (ValueError, KeyError, TypeError, AttributeError, ElementTree.ParseError) as error:
            faults.add("record", f"{path.relative_to(folder)} cannot be read: {error}")


def _size(width: Any, height: Any) -> tuple[int, int] | None:
    """Return height and width; None if a tool left them out, or wrote 0."""
    sides = int(float(height or 0)), int(float(width or 0))
    return sides if min(sides) > 0 else None


def _xml(path: Path, faults: CocoFaults) -> Sequence[Labelled]:
    """Read VOC's XML, about one image, or CVAT's, about all."""
    root = ElementTree.parse(path).getroot()
    if root.tag == "annotation":
        size = _size(root.findtext("size/width"), root.findtext("size/height"))
        objects = [_voc(each) for each in root.iter("object")]
        return [Labelled(Path(root.findtext("filename") or ""), objects, size)]
    if root.tag != "annotations":
        return []
    read = []
    for image in root.iter("image"):
        size, subset = _size(image.get("width"), image.get("height")), image.get("subset") or ""
        # The subset may also be the folder.
        name = Path(subset, image.get("name") or "")
        read.append(Labelled(name, _cvat(image, faults), size, subset))
    return read


def _voc(each: ElementTree.Element) -> Marked:
    name, box = each.findtext("name") or "", each.find("bndbox")
    if box is None:
        raise ValueError(f"an object of {name!r} has no bndbox")
    left, top, right, bottom = (
        float(box.findtext(side) or "nan") for side in ("xmin", "ymin", "xmax", "ymax")
    )
    # As CVAT exports it.
    attributes = {a.findtext("name"): a.findtext("value") for a in each.iter("attribute")}
    rotation = float(attributes.get("rotation") or 0)
    # VOC counts pixels from 1 and includes the last in the box.
    return Marked(name, (left - 1, top - 1, right, bottom), rotation)


def _cvat(image: ElementTree.Element, faults: CocoFaults) -> list[Marked]:
    objects = []
    for each in image:
        label = each.get("label") or ""
        if each.tag == "box":
            left, top, right, bottom = (float(each.attrib[s]) for s in ("xtl", "ytl", "xbr", "ybr"))
            rotation = float(each.get("rotation") or 0)
            objects.append(Marked(label, (left, top, right, bottom), rotation))
        elif each.tag == "polygon":
            points = [point.split(",") for point in each.attrib["points"].split(";")]
            objects.append(Marked(label, _extent([[float(x), float(y)] for x, y in points])))
        elif label:
            faults.add("other-shape", f"{image.get('name')} has a {each.tag} of {label!r}")
    return objects


def _extent(points: Sequence[Sequence[float]]) -> Corners:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return min(xs), min(ys), max(xs), max(ys)


def _json(path: Path, faults: CocoFaults) -> Sequence[Labelled]:
    """Read LabelMe's JSON, about one image, or Create ML's, about all."""
    content = json.loads(path.read_bytes())
    if isinstance(content, dict) and "shapes" in content:
        return [_labelme(path, content, faults)]
    if not isinstance(content, list):
        return []
    read: list[Labelled] = []
    for image in content:
        objects = []
        for each in image["annotations"]:
            x, y, w, h = (float(each["coordinates"][n]) for n in ("x", "y", "width", "height"))
            corners = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
            objects.append(Marked(str(each["label"]), corners))
        read.append(Labelled(Path(str(image["image"])), objects))
    return read


def _labelme(path: Path, content: Mapping[str, Any], faults: CocoFaults) -> Labelled:
    objects = []
    for shape in content["shapes"]:
        points = [(float(x), float(y)) for x, y in shape["points"]]
        kind = shape.get("shape_type") or "polygon"
        if kind == "circle":
            (x, y), end = points
            radius = math.hypot(end[0] - x, end[1] - y)
            points = [(x - radius, y - radius), (x + radius, y + radius)]
        elif kind not in _OF_CORNERS:
            faults.add("other-shape", f"{path.name} has a {kind} of {shape['label']!r}")
            continue
        objects.append(Marked(str(shape["label"]), _extent(points)))
    name = PureWindowsPath(str(content["imagePath"])).name
    size = _size(content.get("imageWidth"), content.get("imageHeight"))
    return Labelled(Path(name), objects, size)


def _tensorflow(path: Path, _: CocoFaults) -> Sequence[Labelled]:
    """Read TensorFlow's CSV: a row per box."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("filename", "class", "xmin", "ymin", "xmax", "ymax")
    if not rows or not set(columns) <= rows[0].keys():
        return []
    images: dict[str, Labelled] = {}
    for row in rows:
        name, kind, *sides = (row[column] for column in columns)
        left, top, right, bottom = map(float, sides)
        size = _size(row.get("width"), row.get("height"))
        read = images.setdefault(name, Labelled(Path(name), [], size))
        if read.size != size:
            raise ValueError(f"{name} has the sizes {read.size} and {size} (height, width)")
        read.objects.append(Marked(kind, (left, top, right, bottom)))
    return list(images.values())


def _kitti(path: Path, _: CocoFaults) -> Sequence[Labelled]:
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows or any(len(row) not in (15, 16) for row in rows):
        return []
    objects = []
    for kind, *numbers in rows:
        left, top, right, bottom = map(float, numbers[3:7])
        if kind != "DontCare":
            objects.append(Marked(kind, (left, top, right, bottom)))
    return [Labelled(Path(f"{path.stem}.png"), objects)]
