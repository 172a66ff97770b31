"""Reads one file in COCO's format: its images, categories and objects, as arrays.

Other tools' variants are read where they are unambiguous: ids in another notation, and areas and
boxes that are missing but follow from a mask. Every fault is noted, and its record left out.

Finds the files of a folder in COCO's format, as COCO, Roboflow, CVAT or Label Studio lay it out.

An annotation file's name, or its folder's, says to which split it belongs; a file without a split
is divided on import. Images are sought next to it, in folders named like the split, and then
anywhere below. A folder without annotation files may be in another format.
"""

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from contract.errors import UserError
from contract.file_names import composed, is_visible
from contract.keys import SPLITS
from training.durable import split_within
from training.workloads.detection.coco_faults import (
    Box,
    CocoFaults,
    box_of,
    exact_id,
    is_text,
    refuse_layout,
)
from training.workloads.detection.image_files import (
    NamedImages,
    is_file,
    upright_size,
    visible_files,
)
from training.workloads.detection.other_formats import convert

_Ints: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float64]
# The names of images -> the folder that they are relative to, and the files of names that are
# written in another way.
_Found: TypeAlias = tuple[Path, Mapping[str, str]]
_FindImages: TypeAlias = Callable[[list[str]], _Found]

# Including paths with a drive letter, and URLs.
_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:[/\\]|\w+://")
_LISTS = ("images", "annotations", "categories")


class Category(NamedTuple):
    """A category; its label in the model is its place among all, ordered by id."""

    id: int
    name: str


class CocoImage(NamedTuple):
    """An image as its file describes it."""

    id: int
    file: str
    height: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CocoSplit:
    """The images of a split and their objects, as arrays, which forked processes share.

    Objects are in the order of their images; those of image k are `starts[k]:starts[k + 1]`.
    """

    name: str
    folder: Path  # the images' files are relative to it
    categories: tuple[Category, ...]  # by id: a label is a place in it
    image_ids: _Ints
    files: npt.NDArray[np.str_]
    sizes: _Ints  # (images, 2): height, width
    starts: _Ints
    boxes: _Floats  # (objects, 4): x, y, width, height in pixels, as annotated
    labels: _Ints
    areas: _Floats
    crowds: npt.NDArray[np.bool_]
    is_of_label_studio: bool = False
    is_converted: bool = False  # from a format in which a box is not [x, y, width, height]

    def __len__(self) -> int:
        return len(self.image_ids)

    def objects(self, index: int) -> slice:
        """Return the slice of an image's objects."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))

    def of_images(self, rows: _Ints, name: str) -> "CocoSplit":
        """Return a split of some of the images."""
        own = np.isin(np.repeat(np.arange(len(self)), self.objects_per_image), rows)
        arrays: dict[str, Any] = {
            key: getattr(self, key)[rows] for key in ("image_ids", "files", "sizes")
        }
        arrays |= {key: getattr(self, key)[own] for key in ("boxes", "labels", "areas", "crowds")}
        starts = np.cumsum([0, *self.objects_per_image[rows]], dtype=np.int64)
        return replace(self, name=name, starts=starts, **arrays)

    @property
    def can_be_learned(self) -> npt.NDArray[np.bool_]:
        """A mask of the objects that are neither crowds nor empty."""
        can_be: npt.NDArray[np.bool_] = ~self.crowds & (self.boxes[:, 2:] > 0).all(axis=1)
        return can_be

    @property
    def objects_per_image(self) -> _Ints:
        """Number of objects of each image, crowds included."""
        return np.diff(self.starts)


def read_split(
    path: Path, name: str, find_images: _FindImages, faults: CocoFaults
) -> CocoSplit | None:
    """Read the annotation file of a split; None if nothing in it can be used."""
    content = _content(path, faults)
    return None if content is None else split_of(content, name, find_images, faults)


def split_of(
    content: Mapping[str, Any], name: str, find_images: _FindImages, faults: CocoFaults
) -> CocoSplit | None:
    """Make a split from COCO's three lists; None if nothing in them can be used."""
    records = [record for record in content["images"] if isinstance(record, dict)]
    names = [_file_name(record) for record in records]
    folder, files = find_images([name.replace("\\", "/") for name in names if is_text(name)])
    reader = _Reader(name=name, folder=folder, files=files, faults=faults)
    by_id = reader.categories(_without_project(content["categories"], content["annotations"]))
    images = reader.images(content["images"])
    boxes = reader.boxes(content["annotations"], images, by_id) if images and by_id else []
    categories = tuple(sorted(category for category in by_id.values() if category))
    usable = [image for image in images.values() if image]
    if not categories or not usable:
        return None
    info = content.get("info")
    made_by = info.get("contributor") if isinstance(info, dict) else None
    split = as_split(name, folder, categories, usable, boxes)
    return replace(split, is_of_label_studio=made_by == "Label Studio")


def as_split(
    name: str,
    folder: Path,
    categories: tuple[Category, ...],
    images: list[CocoImage],
    boxes: list[Box],
) -> CocoSplit:
    """Convert records to arrays, with objects in the order of their images."""
    place = {image.id: number for number, image in enumerate(images)}
    label = {category.id: number for number, category in enumerate(categories)}
    of_image = np.asarray([place[box.image_id] for box in boxes], dtype=np.int64)
    order = np.argsort(of_image, kind="stable")
    counts = np.bincount(of_image, minlength=len(images))
    return CocoSplit(
        name=name,
        folder=folder,
        categories=categories,
        image_ids=np.asarray([image.id for image in images], dtype=np.int64),
        files=np.asarray([image.file for image in images], dtype=np.str_),
        sizes=np.asarray([(i.height, i.width) for i in images], np.int64).reshape(-1, 2),
        starts=np.concatenate([[0], counts.cumsum()]).astype(np.int64),
        boxes=np.asarray([box.xywh for box in boxes], np.float64).reshape(-1, 4)[order],
        labels=np.asarray([label[box.category_id] for box in boxes], np.int64)[order],
        areas=np.asarray([box.area for box in boxes], np.float64)[order],
        crowds=np.asarray([box.is_crowd for box in boxes], np.bool_)[order],
    )


def _content(path: Path, faults: CocoFaults) -> dict[str, Any] | None:
    """Return the three lists of the file; None if any is missing."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        faults.add("json", f"{path.name} is not JSON: {error}")
        return None
    if not isinstance(content, dict):
        kind = type(content).__name__
        faults.add("structure", f"{path.name} has a {kind}, not an object with {', '.join(_LISTS)}")
        return None
    missing = [name for name in _LISTS if not isinstance(content.get(name), list)]
    for name in missing:
        faults.add("structure", f"{path.name} has no list {name!r}")
    return None if missing else content


def _file_name(record: Mapping[str, Any]) -> Any:
    """Return an image's name; LVIS has its URL only, whose end it is."""
    return record.get("file_name") or record.get("coco_url")


def _without_project(categories: list[Any], annotations: list[Any]) -> list[Any]:
    """Drop the project, which Roboflow lists as a category: the supercategory of the others.

    It has no objects, and often the name of a class; with objects, it is a class.
    """
    records = [record for record in categories if isinstance(record, dict)]
    parents = {record.get("supercategory") for record in records} - {"none", None}
    used = {record.get("category_id") for record in annotations if isinstance(record, dict)}
    project = [
        record
        for record in records
        if record.get("supercategory") == "none"
        and record.get("name") in parents
        and record.get("id") not in used
    ]
    return [record for record in categories if not any(record is each for each in project)]


def _is_outside(file: str) -> bool:
    """Return whether a path is absolute, a URL, or leaves its folder."""
    return bool(_ABSOLUTE.match(file)) or ".." in Path(file.replace("\\", "/")).parts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """A reader of one file's records that notes what is wrong with them."""

    name: str  # of the split, for messages
    folder: Path  # of its images
    files: Mapping[str, str]  # of names that are written in another way
    faults: CocoFaults

    def _records(self, kind: str, records: list[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, record in enumerate(records):
            if isinstance(record, dict):
                where = f"{self.name}: {kind} {record.get('id', f'number {number}')}"
                yield where, record
            else:
                text = f"{self.name}: {kind} number {number} is {record!r:.40}, not an object"
                self.faults.add("record", text)

    def _id(self, where: str, record: Mapping[str, Any], key: str) -> int | None:
        value = record.get(key)
        number = exact_id(value)
        if number is None:
            self.faults.add("id", f"{where} has the {key} {value!r:.40}")
        return number

    def _once(
        self, kind: str, records: list[Any], duplicate: str
    ) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """Yield the records with their ids, each id once."""
        seen: set[int] = set()
        for where, record in self._records(kind, records):
            number = self._id(where, record, "id")
            if number in seen:
                self.faults.add(duplicate, f"{where} appears twice")
            elif number is not None:
                seen.add(number)
                yield number, where, record

    def categories(self, records: list[Any]) -> dict[int, Category | None]:
        """Return the categories by id, each name once; None for one with a fault."""
        found: dict[int, Category | None] = {}
        names: dict[str, int] = {}
        for number, where, record in self._once("category", records, "duplicate-category"):
            found[number], name = None, record.get("name")
            if not is_text(name) or not name.strip():
                self.faults.add("record", f"{where} has the name {name!r:.40}")
            elif name in names:
                text = f"{where} is called {name!r}, like category {names[name]}"
                self.faults.add("duplicate-category", text)
            else:
                found[number], names[name] = Category(number, name), number
        if not records:
            self.faults.add("no-categories", f"{self.name} has no categories")
        return found

    def images(self, records: list[Any]) -> dict[int, CocoImage | None]:
        """Return the images by id, in the order of the file; None for one with a fault."""
        found: dict[int, CocoImage | None] = {}
        files: set[str] = set()
        for number, where, record in self._once("image", records, "duplicate-image-id"):
            found[number], file = None, _file_name(record)
            if not is_text(file) or not file:
                self.faults.add("record", f"{where} has the file_name {file!r:.40}")
                continue
            if record.get("not_exhaustive_category_ids"):  # LVIS
                self.faults.add("not-exhaustive", f"{where} is not exhaustively annotated")
            plain = file.replace("\\", "/")  # as tools on Windows write it
            if _is_outside(plain) and plain not in self.files:
                self.faults.add("absolute-path", f"{where} is {file!r}")
                continue
            if _is_outside(plain):
                text = f"{where} is {file!r}, which was found as {self.files[plain]}"
                self.faults.add("found-elsewhere", text)
            file = self.files.get(plain, plain)
            if file in files:
                self.faults.add("duplicate-file", f"{where} is {file}, like another image")
            elif size := self._size(where, record, file):
                files.add(file)
                found[number] = CocoImage(number, file, *size)
        if not records:
            self.faults.add("no-images", f"{self.name} has no images")
        return found

    def _size(self, where: str, record: Mapping[str, Any], file: str) -> tuple[int, int] | None:
        height, width = (exact_id(record.get(key)) for key in ("height", "width"))
        if height and width and min(height, width) > 0:
            return height, width
        if all(record.get(key) not in (None, 0) for key in ("height", "width")):
            given = f"{record['width']!r:.20}x{record['height']!r:.20}"
            self.faults.add("record", f"{where} has the size {given}")
            return None
        size = upright_size(self.folder / file)
        if size is not None:
            self.faults.add("derived-size", f"{where} has no size")
        return size or (1, 1)  # the check of the files reports it as missing

    def boxes(
        self,
        records: list[Any],
        images: Mapping[int, CocoImage | None],
        categories: Mapping[int, Category | None],
    ) -> list[Box]:
        """Return the objects that have a box and whose image and category are usable."""
        found: list[Box] = []
        ids: set[object] = set()
        for where, record in self._records("annotation", records):
            own = str(record.get("id", where))
            if own in ids:
                self.faults.add("duplicate-annotation-id", f"{where} appears twice")
            ids.add(own)
            image_id = self._id(where, record, "image_id")
            category_id = self._id(where, record, "category_id")
            if image_id is None or category_id is None:
                continue
            if image_id not in images:
                text = f"{where} is of image {image_id}, which does not exist"
                self.faults.add("unknown-image", text)
            elif category_id not in categories:
                text = f"{where} is of category {category_id}, which does not exist"
                self.faults.add("unknown-category", text)
            elif images[image_id] and categories[category_id]:
                box = box_of(record, image_id, category_id, where, self.faults)
                found += [] if box is None else [box]
        return found


# The name of a dataset without splits, which an import divides.
UNDIVIDED = "all"
# COCO's own files about other tasks, and files that hold no annotations.
_OTHER = re.compile(
    r"^(captions|person_keypoints|panoptic|stuff|image_info)_|^(manifest|notes)$|^\."
)
# Enough names to see in which folder the images are.
_TRIED = 50


class Source(NamedTuple):
    """An annotation file and its split; for other formats, the converted content."""

    split: str
    path: Path
    content: dict[str, Any] | None = None


def find_sources(folder: Path, faults: CocoFaults) -> tuple[Path, list[Source]]:
    """Return the dataset's folder, which may be the only one inside, and its files by split."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}; pass the folder of a dataset in COCO's format")
    every, reasons = list(_candidates(folder)), CocoFaults()
    found = [source for source in every if _has_lists(source.path)]
    if not found and (converted := convert(folder, reasons)):
        found = [Source(split or UNDIVIDED, folder, of) for split, of in converted.items()]
    if not found:
        inside = [path for path in folder.iterdir() if is_visible(path.name) and path.is_dir()]
        if len(inside) == 1:
            return find_sources(inside[0], faults)
    faults.include(reasons)
    if found or every:
        return folder, _by_split(folder, found or every, every, faults)
    if not faults.is_refused:
        raise refuse_layout(f"{folder} has no annotation file in COCO's format")
    return folder, []


def _by_split(
    folder: Path, found: list[Source], every: list[Source], faults: CocoFaults
) -> list[Source]:
    """Return one source for each split; note the files of `every` that are left out."""
    if any(source.split != UNDIVIDED for source in found):
        found = [source for source in found if source.split != UNDIVIDED]
    for source in every:
        if source not in found:
            why = "names no split" if source.split == UNDIVIDED else "has none of COCO's lists"
            faults.add("unread-file", f"{source.path.relative_to(folder)} {why}")
    by_split: dict[str, Source] = {}
    for source in found:
        split = source.split
        if split in by_split:
            paths = by_split[split].path, source.path
            names = " and ".join(str(path.relative_to(folder)) for path in paths)
            what = "are both of one dataset" if split == UNDIVIDED else f"both describe {split}"
            raise UserError(f"{names} {what}; keep only one of them")
        by_split[split] = source
    if by_split.keys() == {"train"}:  # which holds nothing out, so the import divides it
        by_split = {UNDIVIDED: by_split["train"]._replace(split=UNDIVIDED)}
    if UNDIVIDED not in by_split:
        _note_lacking(folder, by_split, faults)
    return [by_split[split] for split in (*SPLITS, UNDIVIDED) if split in by_split]


def divided_by_folder(folder: Path, split: CocoSplit, faults: CocoFaults) -> list[CocoSplit]:
    """Divide images that no annotation file divides, if their own folders hold some out."""
    parents = [Path(file).parts[:-1] for file in split.files.tolist()]
    named = [[name for part in parts if (name := split_within(part))][-1:] for parts in parents]
    names = np.asarray([name[0] if name else UNDIVIDED for name in named])
    if split.name != UNDIVIDED or set(names) <= {"train", UNDIVIDED} or len(set(names)) == 1:
        return [split]
    _note_lacking(folder, set(names), faults)
    return [split.of_images(np.flatnonzero(names == of), of) for of in SPLITS if of in names]


def _note_lacking(folder: Path, splits: Container[str], faults: CocoFaults) -> None:
    if "train" not in splits:
        raise refuse_layout(f"{folder} has no annotations for train")
    if "validation" not in splits:
        faults.add("drawn-validation", f"{folder} has no annotations for validation")


def _candidates(folder: Path) -> Iterator[Source]:
    found = sorted([*folder.glob("*.json"), *folder.glob("*/*.json")])
    found = [p for p in found if is_visible(p.relative_to(folder).as_posix())]
    own = [path for path in found if not _OTHER.search(path.stem)]
    # Keypoints have boxes too, which count if nothing else has any.
    for path in own or [path for path in found if path.stem.startswith("person_keypoints_")]:
        if _is_other(path):
            continue
        split = split_within(path.stem)
        if split is None and path.parent != folder:
            split = split_within(path.parent.name)
        yield Source(split or UNDIVIDED, path)


def _has_lists(path: Path) -> bool:
    """Return whether a file has one of the lists that only COCO has; its content may be broken."""
    return re.search(rb'"(images|annotations)"\s*:', path.read_bytes()) is not None


def _is_other(path: Path) -> bool:
    """Return whether a file is another tool's by how it begins: LabelMe's, or a list."""
    with path.open("rb") as file:
        begin = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    is_labelme = b'"shapes"' in begin or b'"imageData"' in begin
    return begin.startswith(b"[") or (is_labelme and b'"annotations"' not in begin)


def find_images(folder: Path, source: Source, faults: CocoFaults, files: list[str]) -> _Found:
    """Return the folder of an annotation file's images, and files of names that are not there.

    An image may be called in another form of Unicode. If most names are of another machine (they
    are absolute, or leave their folder), the longest end of each decides.
    """
    images = NamedImages(folder)
    root = _root_of(source, files, images, faults)
    lost = [file for file in files if _is_outside(file) or not is_file(root / file)]
    is_foreign = 2 * sum(map(_is_outside, files)) > len(files)
    found: dict[str, list[Path]] = {}
    for file in lost:
        if not _is_outside(file):
            found[file] = images.at(root / file)
        elif is_foreign:
            found[file] = images.find(file, source.path.parent)
    found = {file: own for file, own in found.items() if len(own) == 1}
    root = folder if is_foreign and found else root
    return root, {file: own[0].relative_to(root).as_posix() for file, own in found.items()}


def _root_of(source: Source, files: list[str], images: NamedImages, faults: CocoFaults) -> Path:
    """Return the folder to which an annotation file's images are relative: where most exist."""
    folder, near = images.folder, source.path.parent
    own = sorted(p for p in folder.iterdir() if p.is_dir() and split_within(p.name) == source.split)
    roots = [near, *own, folder, folder / "images", near / "images", near / "data"]
    for above in (folder / "images", folder / "data", folder):
        inside = sorted(path for path in above.glob("*") if path.is_dir())
        roots += [p for p in inside if split_within(p.name) == source.split or p.name == "default"]
    tried = files[:: max(1, len(files) // _TRIED)]

    def rank(root: Path) -> tuple[int, bool, bool]:
        is_own = source.split in map(split_within, root.relative_to(folder).parts)
        return sum(images.has(root / file) for file in tried), near in root.parents, is_own

    first = max(roots, key=lambda root: rank(root)[0])
    if most := rank(first)[0]:
        # train_rgb beside train_depth; of train and train_masks, the first is meant.
        beside = (r for r in roots if r.parent == first.parent and rank(r)[0] == most)
        own = [r for r in beside if split_within(r.name) == source.split]
        best = [first, *(r for r in own if not r.name.startswith(first.name))]
    else:
        roots = [root for root in _roots_below(folder, tried) if rank(root)[0]]
        if not roots:  # then where a user would look for them
            name = "images" if source.split == UNDIVIDED else source.split
            return own[0] if own else folder / name
        highest = max(map(rank, roots))
        best = [root for root in roots if rank(root) == highest]
    if any(sum(images.has(root / file) for root in best) > 1 for file in tried):
        file, *two = (str(path.relative_to(folder)) for path in (source.path, *best[:2]))
        faults.add("several-images", f"{file} names images that are both in {' and '.join(two)}")
    return best[0]


def _roots_below(folder: Path, files: list[str]) -> list[Path]:
    """Return the folders, anywhere below `folder`, to which these files would be relative."""
    ends = {Path(composed(file)).parts for file in files}
    names = {end[-1] for end in ends if end}
    found = (path for path in visible_files(folder) if composed(path.name) in names)
    roots = {
        path.parents[len(end) - 1]
        for path in found
        for end in ends
        if end and tuple(map(composed, path.parts[-len(end) :])) == end
    }
    return sorted(roots)


def unlisted_images(folder: Path, listed: set[Path]) -> list[Path]:
    """Return the image files below `folder` that no annotation file names."""
    return [path for path in NamedImages(folder).paths if path.is_file() and path not in listed]
