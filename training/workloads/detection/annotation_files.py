"""Reads other tools' annotation files: each tool's boxes, as its own code or documentation means.

Pascal VOC and CVAT (XML), LabelMe, Label Studio and Create ML (JSON), TensorFlow's CSV, and KITTI.
What has no extent, such as points and lines, is left out, with a warning.
"""

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote
from xml.etree import ElementTree

from training.workloads.detection.coco_faults import CocoFaults
from training.workloads.detection.image_files import IMAGE_SUFFIXES, visible_files

# Left, top, right, bottom, in pixels.
Corners: TypeAlias = tuple[float, float, float, float]
_Points: TypeAlias = Sequence[Sequence[float]]


class Marked(NamedTuple):
    """An object: its class's name, its corners, and by how many degrees they are rotated.

    A crowd is neither learned nor counted as wrong.
    """

    name: str
    corners: Corners
    rotation: float = 0.0
    is_crowd: bool = False


class Labelled(NamedTuple):
    """An image and its objects; height and width when they were drawn, and its split, if known.

    `folder` is the name of the image's own; a frame that nothing is drawn on may be missing.
    """

    image: Path
    objects: list[Marked]
    size: tuple[int, int] | None = None
    split: str | None = None
    folder: str = ""
    may_lack: bool = False


def read_files(folder: Path, faults: CocoFaults) -> Iterator[tuple[Path, Sequence[Labelled]]]:
    """Yield each annotation file with the images that it describes."""
    readers = {".xml": _xml, ".json": _json, ".csv": _tensorflow, ".txt": _kitti}
    for path in visible_files(folder):
        if path.suffix.lower() not in readers or not path.is_file():
            continue
        try:
            yield path, readers[path.suffix.lower()](path, faults)
        except (ValueError, LookupError, TypeError, AttributeError, SyntaxError) as error:
            faults.add("record", f"{path.relative_to(folder)} cannot be read: {error}")


def _size(width: Any, height: Any) -> tuple[int, int] | None:
    """Return height and width; None if a tool left them out, or wrote 0."""
    sides = int(float(height or 0)), int(float(width or 0))
    return sides if min(sides) > 0 else None


def _extent(points: _Points) -> Corners:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return min(xs), min(ys), max(xs), max(ys)


def _ordered(corners: Sequence[float], where: str, faults: CocoFaults) -> Corners:
    """Return the corners in order; some tools keep the direction in which a box was drawn."""
    left, top, right, bottom = corners
    if left > right or top > bottom:
        text = f"{where} has a box from ({left:g}, {top:g}) to ({right:g}, {bottom:g})"
        faults.add("swapped-corners", text)
    return min(left, right), min(top, bottom), max(left, right), max(top, bottom)


def _xml(path: Path, faults: CocoFaults) -> Sequence[Labelled]:
    """Read VOC's XML, about one image, or CVAT's, about all."""
    root = _root(path.read_bytes())
    if root.tag == "annotation":
        size = _size(root.findtext("size/width"), root.findtext("size/height"))
        # VOC counts pixels from 1, but Label Studio from 0, and CVAT, which writes shares of them.
        sides = [float(side.text or 0) for box in root.iter("bndbox") for side in box]
        is_of_0 = root.findtext("owner/name") == "Label Studio" or any(n % 1 for n in sides)
        first = 0.0 if is_of_0 else 1.0
        objects = [_voc(each, path.name, first, faults) for each in root.iter("object")]
        name, folder = root.findtext("filename") or "", root.findtext("folder") or ""
        return [Labelled(Path(name), objects, size, folder=folder)]
    return _cvat(root, faults) if root.tag == "annotations" else []


def _root(content: bytes) -> ElementTree.Element:
    """Return the root of an XML file in any encoding that it declares; expat knows few."""
    try:
        return ElementTree.fromstring(content)
    except ValueError:
        declared = re.search(rb"encoding\s*=\s*[\"']([\w.-]+)", content[:200])
        name = declared[1].decode().lower() if declared else "utf-8"
        # Windows means GBK by GB2312, and GB 18030 includes both.
        return ElementTree.fromstring(content.decode("gb18030" if name == "gb2312" else name))


def _voc(each: ElementTree.Element, where: str, first: float, faults: CocoFaults) -> Marked:
    name, box, polygon = each.findtext("name") or "", each.find("bndbox"), each.find("polygon")
    # The development kit: "objects marked as difficult are currently ignored in the evaluation".
    is_crowd = (each.findtext("difficult") or "0").strip() == "1"
    if is_crowd:
        faults.add("difficult", f"{where} has a {name!r} that is marked as difficult")
    if box is None and polygon is not None:
        xs, ys = ([float(e.text or "nan") for e in polygon.iter() if e.tag[0] == of] for of in "xy")
        return Marked(name, _extent([*zip(xs, ys, strict=True)]), is_crowd=is_crowd)
    if box is None:
        raise ValueError(f"an object of {name!r} has neither bndbox nor polygon")
    sides = [float(box.findtext(side) or "nan") for side in ("xmin", "ymin", "xmax", "ymax")]
    left, top, right, bottom = _ordered(sides, f"{where}: a {name!r}", faults)
    # As CVAT exports it.
    attributes = {a.findtext("name"): a.findtext("value") for a in each.iter("attribute")}
    rotation = float(attributes.get("rotation") or 0)
    # The last pixel is in the box.
    return Marked(name, (left - first, top - first, right, bottom), rotation, is_crowd)


def _cvat(root: ElementTree.Element, faults: CocoFaults) -> list[Labelled]:
    """Read CVAT for images, or CVAT for video, whose tracks have each frame's shape."""
    read = []
    for image in root.iter("image"):
        size, subset = _size(image.get("width"), image.get("height")), image.get("subset") or ""
        name = image.get("name") or ""
        objects = [marked for each in image if (marked := _cvat_shape(each, name, faults))]
        # The subset may also be the folder.
        read.append(Labelled(Path(subset, name), objects, size, subset))
    frames = defaultdict[tuple[int, str], list[Marked]](list)
    for track in root.iter("track"):
        for frame, marked in _cvat_track(track, faults):
            frames[frame, track.get("subset") or ""].append(marked)
    if frames:
        size = _size(*(root.findtext(f".//original_size/{side}") for side in ("width", "height")))
        # Frames on which nothing is drawn are the task's too, if they were exported.
        numbers = {frame for frame, _ in frames}
        last = int(root.findtext(".//stop_frame") or max(numbers))
        empty = [(n, "") for n in range(last + 1) if n not in numbers]
        for frame, subset in [*frames, *empty]:
            seen = frames.get((frame, subset), [])
            named = Path(subset, f"frame_{frame:06}")
            read.append(Labelled(named, seen, size, subset, may_lack=not seen))
    return read


def _cvat_track(track: ElementTree.Element, faults: CocoFaults) -> Iterator[tuple[int, Marked]]:
    """Yield a track's object in each frame in which it is seen; between two, as CVAT moves it."""
    before: tuple[int, Marked] | None = None
    for each in sorted(track, key=lambda each: int(each.get("frame") or 0)):
        each.set("label", track.get("label") or "")
        frame, is_outside = int(each.get("frame") or 0), each.get("outside") == "1"
        if (marked := _cvat_shape(each, f"frame {frame}", faults)) is None:
            continue
        for between in range(before[0] + 1, frame) if before else ():
            assert before is not None
            share = 0.0 if is_outside else (between - before[0]) / (frame - before[0])
            ends = zip(before[1].corners, marked.corners, strict=True)
            left, top, right, bottom = (a + (b - a) * share for a, b in ends)
            corners = (left, top, right, bottom)
            yield between, Marked(marked.name, corners, before[1].rotation)
        before = None if is_outside else (frame, marked)
        if before:
            yield before


def _cvat_shape(each: ElementTree.Element, where: str, faults: CocoFaults) -> Marked | None:
    label, rotation, number = each.get("label") or "", float(each.get("rotation") or 0), each.attrib
    if each.tag == "box":
        left, top, right, bottom = (float(number[side]) for side in ("xtl", "ytl", "xbr", "ybr"))
        return Marked(label, (left, top, right, bottom), rotation)
    if each.tag == "polygon":
        points = [point.split(",") for point in number["points"].split(";")]
        return Marked(label, _extent([[float(x), float(y)] for x, y in points]))
    if each.tag == "ellipse":
        x, y, wide, high = (float(number[name]) for name in ("cx", "cy", "rx", "ry"))
        return Marked(label, _of_ellipse(x, y, wide, high, rotation))
    if each.tag == "mask":
        left, top, wide, high = (float(number[n]) for n in ("left", "top", "width", "height"))
        return Marked(label, (left, top, left + wide, top + high))
    if label and each.tag != "tag":
        faults.add("other-shape", f"{where} has a {each.tag} of {label!r}")
    return None


def _of_ellipse(x: float, y: float, wide: float, high: float, degrees: float) -> Corners:
    """Return the extent of an ellipse of these radii, rotated about its centre."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    across, down = math.hypot(wide * cos, high * sin), math.hypot(wide * sin, high * cos)
    return x - across, y - down, x + across, y + down


def _json(path: Path, faults: CocoFaults) -> Sequence[Labelled]:
    """Read LabelMe's JSON, about one image, or Label Studio's or Create ML's, about all."""
    content = json.loads(path.read_bytes())
    if isinstance(content, dict) and "shapes" in content:
        return [_labelme(path, content, faults)]
    records = [each for each in content if isinstance(each, dict)] if type(content) is list else ()
    read = (
        _create_ml(each) if {"image", "annotations"} <= {*each} else _label_studio(each, faults)
        for each in records
    )
    return [each for each in read if each]


def _create_ml(image: Mapping[str, Any]) -> Labelled:
    objects = []
    for each in image["annotations"]:
        x, y, w, h = (float(each["coordinates"][n]) for n in ("x", "y", "width", "height"))
        objects.append(Marked(str(each["label"]), (x - w / 2, y - h / 2, x + w / 2, y + h / 2)))
    return Labelled(Path(str(image["image"])), objects)


def _labelme(path: Path, content: Mapping[str, Any], faults: CocoFaults) -> Labelled:
    """Read one image; shapes of one label and group are one object, as labelme2coco has it."""
    objects: dict[object, Marked] = {}
    for number, shape in enumerate(content["shapes"]):
        points = [(float(x), float(y)) for x, y in shape["points"]]
        kind, name = shape.get("shape_type") or "polygon", str(shape["label"])
        if kind == "circle":
            (x, y), end = points
            radius = math.hypot(end[0] - x, end[1] - y)
            points = [(x - radius, y - radius), (x + radius, y + radius)]
        elif kind == "mask":  # whose last pixel is part of it
            points = [points[0], (points[1][0] + 1, points[1][1] + 1)]
        elif kind not in _OF_CORNERS:
            faults.add("other-shape", f"{path.name} has a {kind} of {name!r}")
            continue
        group = shape.get("group_id")
        key = (name, group) if group is not None else number
        if key in objects:
            left, top, right, bottom = objects[key].corners
            points += [(left, top), (right, bottom)]
        objects[key] = Marked(name, _extent(points))
    image = PureWindowsPath(str(content["imagePath"])).as_posix()
    size = _size(content.get("imageWidth"), content.get("imageHeight"))
    return Labelled(Path(image), [*objects.values()], size)


# LabelMe's shapes with corners; the last is X-AnyLabeling's.
_OF_CORNERS = ("polygon", "rectangle", "oriented_rectangle", "rotation")


def _label_studio(task: Mapping[str, Any], faults: CocoFaults) -> Labelled | None:
    """Read one task: of several annotations, the true one or the newest that was not skipped."""
    made = task.get("annotations", task.get("completions"))
    if made is None:  # as JSON-MIN
        of_task = [each for own in task.values() if isinstance(own, list) for each in own]
        regions = [{**each, "value": each} for each in of_task if isinstance(each, dict)]
        regions = [each for each in regions if "original_width" in each]
        texts = task.values() if regions else ()
    else:
        kept = [each for each in made if not (each.get("was_cancelled") or each.get("skipped"))]
        kept.sort(key=lambda each: (bool(each.get("ground_truth")), str(each.get("created_at"))))
        if made and not kept:
            return None
        if len(kept) > 1:
            faults.add("other-annotations", f"task {task.get('id')} has {len(kept)} annotations")
        regions = kept[-1]["result"] if kept else []
        texts = task["data"].values()
    places = [text.partition("?d=")[2] or text.partition("?")[0] for text in map(str, texts)]
    names = [unquote(text) for text in places if Path(text).suffix.lower() in IMAGE_SUFFIXES]
    if not names:
        return None
    found = [(region, _region(region, names[0], faults)) for region in regions]
    sizes = {_size(r.get("original_width"), r.get("original_height")) for r, m in found if m}
    return Labelled(Path(names[0]), [m for _, m in found if m], sizes.pop() if sizes else None)


def _region(region: Mapping[str, Any], image: str, faults: CocoFaults) -> Marked | None:
    """Read a region of an image, in hundredths of its sides, rotated about its top left corner."""
    value = region.get("value") or {}
    labels = [own for key, own in value.items() if key.endswith("labels") and own]
    if not labels:
        return None
    name = str(labels[0][0])
    if turn := region.get("image_rotation"):
        faults.add("image-rotation", f"{image} was turned by {turn} degrees in Label Studio")
    wide, high = (float(region[f"original_{side}"]) / 100 for side in ("width", "height"))
    degrees = float(value.get("rotation") or 0)
    if "points" in value:
        return Marked(name, _extent([[x * wide, y * high] for x, y in value["points"]]))
    if "radiusX" in value:
        x, y = value["x"] * wide, value["y"] * high
        return Marked(
            name, _of_ellipse(x, y, value["radiusX"] * wide, value["radiusY"] * high, degrees)
        )
    if "width" not in value or "height" not in value or "x" not in value:
        faults.add("other-shape", f"{image} has a {region.get('type') or 'region'} of {name!r}")
        return None
    width, height = value["width"] * wide, value["height"] * high
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x = value["x"] * wide + (width * cos - height * sin) / 2
    y = value["y"] * high + (width * sin + height * cos) / 2
    corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    return Marked(name, corners, degrees)


def _tensorflow(path: Path, faults: CocoFaults) -> Sequence[Labelled]:
    """Read TensorFlow's CSV: a row per box."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("filename", "class", "xmin", "ymin", "xmax", "ymax")
    if not rows or not set(columns) <= rows[0].keys():
        return []
    images: dict[str, Labelled] = {}
    for row in rows:
        name, kind, *sides = (row[column] for column in columns)
        size = _size(row.get("width"), row.get("height"))
        read = images.setdefault(name, Labelled(Path(name), [], size))
        if read.size != size:
            raise ValueError(f"{name} has the sizes {read.size} and {size} (height, width)")
        read.objects.append(Marked(kind, _ordered([*map(float, sides)], name, faults)))
    return list(images.values())


def _kitti(path: Path, faults: CocoFaults) -> Sequence[Labelled]:
    text = path.read_text(encoding="utf-8", errors="replace")  # it may be anything
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows or any(len(row) not in (15, 16) for row in rows):
        return []
    objects = []
    for kind, *numbers in rows:
        left, top, right, bottom = map(float, numbers[3:7])
        if kind != "DontCare":
            objects.append(Marked(kind, (left, top, right, bottom)))
    if len(objects) < len(rows):
        faults.add("ignored-region", f"{path.name} has regions of the type DontCare")
    # Of four cameras, the left one for colours; its labels are in label_2.
    return [Labelled(Path(path.stem), objects, folder=path.parent.name.replace("label", "image"))]
