"""Converts annotations in other formats, recognized by their files, to COCO's three lists.

YOLO, and what annotation_files.py reads. Everything is then checked like COCO's annotations. Splits
that a dataset names itself (data.yaml, YOLO's lists, VOC's ImageSets) win over the names of
folders.

Reads YOLO's text files: a row for each object, as shares of the image as it is displayed.

A row is a class and a box, a box with keypoints (`kpt_shape` in data.yaml), or the corners of a
polygon or an oriented box, as ultralytics reads it; without data.yaml, keypoints and corners may
look alike, which is refused.
"""

import os
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from contract.errors import UserError
from contract.file_names import composed
from training.durable import split_within
from training.workloads.detection.annotation_files import Corners, Labelled, Marked, read_files
from training.workloads.detection.coco_faults import CocoFaults
from training.workloads.detection.image_files import (
    IMAGE_SUFFIXES,
    NamedImages,
    upright_size,
    visible_files,
)

# Its classes, and the content of the YAML file that names them, if one does.
Yolo: TypeAlias = tuple[list[str], Mapping[str, Any] | None]
_Row: TypeAlias = tuple[str, list[str]]  # where it is, and its words

# Coordinates may pass the border by this share, as ultralytics permits.
_BEYOND = 0.01
# Of a keypoint. 0: not labelled, 1: hidden, 2: visible.
_VISIBILITY = re.compile(r"[012](\.0*)?")


def yolo_of(folder: Path) -> Yolo:
    """Return YOLO's classes: `names` in a YAML file, or the lines of classes.txt or obj.names."""
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        if re.search(r"^(names|nc)\s*:", "\n".join(lines(path)), re.MULTILINE):
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
        content = yaml.safe_load("\n".join(lines(path)))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    names = content.get("names") or [f"class_{n}" for n in range(int(content.get("nc") or 0))]
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
    texts = _texts(folder)
    rows = {image: _rows(folder, image, texts) for image in images}
    expected = f"{len(names)} classes from 0 and a box" + (
        f" of kpt_shape {shape}" if shape[0] else ""
    )
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
                # What a detector found and saved; ultralytics refuses to train on it too.
                scored = ", a box with a confidence" if len(shares) == 5 else ""
                faults.add("record", f"{where} is {row:.40}{scored}, not one of {expected}")
                continue
            left, top, right, bottom = corners
            sides = (left * width, top * height, right * width, bottom * height)
            objects.append(Marked(name, sides))
        yield Labelled(image, objects)


def _texts(folder: Path) -> dict[str, Path]:
    """Return the text files below a folder by path."""
    found = [path for path in visible_files(folder) if path.suffix.lower() == ".txt"]
    return {composed(path.relative_to(folder).as_posix()): path for path in found}


def _rows(folder: Path, image: Path, texts: Mapping[str, Path]) -> list[_Row]:
    """Return the rows of an image's text file; `labels` replaces `images` in its path."""
    parts = list(image.relative_to(folder).with_suffix(".txt").parts)
    places = [at for at, part in enumerate(parts[:-1]) if part == "images"]
    for at in places[-1:]:
        parts[at] = "labels"
    path = Path(*parts)
    own = texts.get(composed(path.as_posix()))
    return [
        (f"{path}, line {number},", line.split())
        for number, line in enumerate(lines(own) if own else (), 1)
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
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error.reason}; save it as UTF-8") from error
    return [line for line in text.splitlines() if line.strip()]


# In a list of ImageSets/Main about a class: whether an image shows it.
_SHOWS = re.compile(r"\s+-?[01]$")
_LISTS, _JOINED = "ImageSets/Main/*", ("trainval",)


def named_splits(
    folder: Path, images: Sequence[Path], described: Mapping[str, Any], faults: CocoFaults
) -> dict[Path, str]:
    """Return the split of each image for which the content of data.yaml or a list names one."""
    known = defaultdict[str, list[Path]](list)  # by path, with and without suffix, and by folder
    for image in images:
        name = above = composed(image.relative_to(folder).as_posix())
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
                text = f"{by} names {place!r} for {split}, where {folder} has no image"
                faults.add("split-place", text)
                continue
            for image in known[own]:
                if (other := found.setdefault(image, split)) != split:
                    text = f"{by} names {image.relative_to(folder)} for {split}, which is also "
                    faults.add("two-splits", f"{text}named for {other}")
    return found


def _named(
    folder: Path, described: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, Sequence[str]]]:
    """Yield a split, the file that names it, and its places with what they are relative to."""
    texts = _texts(folder)
    # As for VOC 2007, of which many keep only these two lists.
    joined = () if any(path.match("ImageSets/Main/val.txt") for path in texts.values()) else _JOINED
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
        elif (split := "train" if path.stem in joined else split) and path.match(_LISTS):
            inside = path.relative_to(folder).parents[2]
            yield split, name, f"{inside}/JPEGImages", [_SHOWS.sub("", x) for x in lines(path)]


def _located(place: str, base: str, known: Container[str]) -> str | None:
    """Return the longest end of a path that is known.

    What names a split stays in it, unless the path is absolute: valid/images is not images.
    """
    place = composed(place.strip().replace("\\", "/"))
    is_absolute = re.match(r"/|[A-Za-z]:", place) is not None
    joined = os.path.normpath(place if is_absolute else f"{base}/{place}")
    parts = [part for part in joined.split("/") if part not in ("", ".", "..")]
    for start in range(max(1, len(parts))):
        if (end := "/".join(parts[start:]) or ".") in known:
            dropped = {part for part in place.split("/") if split_within(part)} - {*end.split("/")}
            return end if is_absolute or not start or not dropped else None
    return None


def convert(folder: Path, faults: CocoFaults) -> dict[str, dict[str, Any]] | None:
    """Return COCO's lists by split ("" if none is named); None for a folder of no known format.

    YOLO's classes keep their order; those of the other formats are sorted by name.
    """
    images = NamedImages(folder)
    names, described = yolo = yolo_of(folder)
    found = list(read_yolo(folder, images.paths, yolo, faults)) if names else []
    if not any(each.objects for each in found):  # a list of names alone does not make it YOLO's
        others = list(_by_file(folder, images, faults))
        names, found = ([], others) if others else (names, found)
    if not found:
        _note_reason(folder, names, faults)
        return None
    kinds = names or sorted({mark.name for of in found for mark in of.objects})
    named = named_splits(folder, images.paths, described or {}, faults)
    # Then the check lists the others as not used.
    is_divided = "train" in named.values() and len(set(named.values())) > 1
    splits: dict[str, list[Labelled]] = {}
    for each in found:
        if each.image in named or not is_divided:
            by_folder = _by_folder(each.image.relative_to(folder))
            split = named.get(each.image) or each.split or by_folder or ""
            splits.setdefault(split, []).append(each)
    return {split: _as_coco(folder, of, kinds) for split, of in splits.items()}


def _note_reason(folder: Path, names: Sequence[str], faults: CocoFaults) -> None:
    """Note why nothing can be read from YOLO's rows: no images, or no names of their classes."""
    if names:
        faults.add("no-images", f"{folder} names the classes {', '.join(names):.60}, but no images")
    for name, path in {}.items() if names else _texts(folder).items():
        rows = [line.split() for line in lines(path)]
        if rows and all(len(row) > 4 and re.fullmatch(r"\d+", row[0]) for row in rows):
            faults.add(
                "nameless-classes", f"{name} has YOLO's rows, such as {' '.join(rows[0]):.40}"
            )


def _as_coco(root: Path, found: Sequence[Labelled], kinds: Sequence[str]) -> dict[str, Any]:
    """List images and objects as COCO does; ids count from 1."""
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    ids = {kind: number for number, kind in enumerate(kinds, 1)}
    for number, each in enumerate(found, 1):
        height, width = each.size or upright_size(each.image) or (1, 1)
        name = each.image.relative_to(root).as_posix()
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        for mark in each.objects:
            left, top, right, bottom = mark.corners
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": ids[mark.name],
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": int(mark.is_crowd),
                    "attributes": {"rotation": mark.rotation},
                }
            )
    categories = [{"id": number, "name": kind} for kind, number in ids.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def _by_folder(path: Path) -> str | None:
    """Return the split that the lowest of a path's folders names."""
    named = [split for part in path.parts[:-1] if (split := split_within(part))]
    return named[-1] if named else None


def _by_file(folder: Path, images: NamedImages, faults: CocoFaults) -> Iterator[Labelled]:
    """Yield the images of all XML, JSON, CSV and text files that a reader understands."""
    found = list(read_files(folder, faults))
    # train_labels.csv next to test_labels.csv, or XML in folders; one alone may have any name.
    own_splits = [
        (split_within(path.stem) if len(read) > 1 else None) or _by_folder(path.relative_to(folder))
        for path, read in found
    ]
    are_splits = len(set(own_splits) - {None}) > 1
    for (path, read), own_split in zip(found, own_splits, strict=True):
        for each in read:
            name, where = str(each.image), path.relative_to(folder)
            own = images.find(name, path.parent, each.folder)
            if not own and len(read) == 1:  # the image may have been renamed with the file
                own = images.find(path.stem, path.parent, each.folder)
            split = split_within(each.split or "") or (own_split if are_splits else None)
            if len(own) > 1:
                of_split = [one for one in own if split == _by_folder(one.relative_to(folder))]
                own = of_split if split and of_split else own
            if len(own) > 1:
                two = " and ".join(str(one.relative_to(folder)) for one in own[:2])
                faults.add("several-images", f"{where} names {name!r}, which {two} are called")
            elif own:
                yield each._replace(image=own[0], split=split)
            elif not each.may_lack:
                faults.add("missing-file", f"{where} names the image {name!r}")
