"""Finds the files of a folder in COCO's format, as COCO, Roboflow, CVAT or Label Studio lay it out.

An annotation file's name, or its folder's, says to which split it belongs; a file without a split
is divided on import. Images are sought next to it, in folders named like the split, and then
anywhere below. A folder without annotation files may be in another format.
"""

import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contract.errors import UserError
from training.durable import split_within
from training.workloads.detection.coco import CocoSplit
from training.workloads.detection.coco_faults import CocoFaults, refuse_layout
from training.workloads.detection.image_files import IMAGE_SUFFIXES
from training.workloads.detection.other_formats import convert

# The name of a dataset without splits, which an import divides.
UNDIVIDED = "all"
_SPLITS = ("train", "validation", "test")
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
    found = list(_candidates(folder))
    if not found and (converted := convert(folder, faults)):
        found = [Source(split or UNDIVIDED, folder, of) for split, of in converted.items()]
    if not found:
        inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
        if len(inside) == 1 and inside[0].is_dir():
            return find_sources(inside[0], faults)
        raise refuse_layout(f"{folder} has no annotation file in COCO's format")
    if any(source.split != UNDIVIDED for source in found):
        for source in found:
            if source.split == UNDIVIDED and source.content is None:
                faults.add("unread-file", f"{source.path.relative_to(folder)} names no split")
        found = [source for source in found if source.split != UNDIVIDED]
    by_split: dict[str, Source] = {}
    for source in found:
        split = source.split
        if split in by_split:
            paths = by_split[split].path, source.path
            names = " and ".join(str(path.relative_to(folder)) for path in paths)
            what = "are both of one dataset" if split == UNDIVIDED else f"both describe {split}"
            raise UserError(f"{names} {what}; keep only one of them")
        by_split[split] = source
    if UNDIVIDED not in by_split:
        _refuse_lacking(folder, by_split)
    return folder, [by_split[split] for split in (*_SPLITS, UNDIVIDED) if split in by_split]


def divided_by_folder(folder: Path, split: CocoSplit) -> list[CocoSplit]:
    """Divide images that no annotation file divides, if their own folders hold some out."""
    parents = [Path(file).parts[:-1] for file in split.files.tolist()]
    named = [[name for part in parts if (name := split_within(part))][-1:] for parts in parents]
    names = np.asarray([name[0] if name else UNDIVIDED for name in named])
    if split.name != UNDIVIDED or set(names) <= {"train", UNDIVIDED} or len(set(names)) == 1:
        return [split]
    _refuse_lacking(folder, set(names))
    return [split.of_images(np.flatnonzero(names == of), of) for of in _SPLITS if of in names]


def _refuse_lacking(folder: Path, splits: Container[str]) -> None:
    if lacks := [split for split in ("train", "validation") if split not in splits]:
        raise refuse_layout(f"{folder} has no annotations for {' and '.join(lacks)}")


def _candidates(folder: Path) -> Iterator[Source]:
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        if _OTHER.search(path.stem) or path.parent.name.startswith(".") or _is_other(path):
            continue
        split = split_within(path.stem)
        if split is None and path.parent != folder:
            split = split_within(path.parent.name)
        yield Source(split or UNDIVIDED, path)


def _is_other(path: Path) -> bool:
    """Return whether a file is LabelMe's, for one image, or Create ML's, by how it begins."""
    with path.open("rb") as file:
        begin = file.read(4096)
    if begin.lstrip().startswith(b"["):
        return b'"coordinates"' in begin
    is_labelme = b'"shapes"' in begin or b'"imageData"' in begin
    return is_labelme and b'"annotations"' not in begin


def find_images(folder: Path, source: Source, files: list[str]) -> Path:
    """Return the folder to which an annotation file's images are relative: where most exist."""
    near = source.path.parent
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    own = [name for name in sorted(names) if split_within(name) == source.split]
    roots = [
        near,
        *(folder / name for name in own),
        folder,
        folder / "images",
        near / "images",
    ]
    for images in (folder / "images", folder / "data", folder):
        if images.is_dir():
            inside = sorted(path for path in images.iterdir() if path.is_dir())
            roots += [
                p for p in inside if split_within(p.name) == source.split or p.name == "default"
            ]
    tried = files[:: max(1, len(files) // _TRIED)]
    there = [sum(is_file(root / file) for file in tried) for root in roots]
    if not any(there):
        roots = _roots_below(folder, tried)
        there = [sum(is_file(root / file) for file in tried) for root in roots]
    if not any(there):  # then where a user would look for them
        name = "images" if source.split == UNDIVIDED else source.split
        return folder / (own[0] if own else name)
    return roots[there.index(max(there))]


def _roots_below(folder: Path, files: list[str]) -> list[Path]:
    """Return the folders, anywhere below `folder`, to which these files would be relative."""
    ends = {Path(file).parts for file in files}
    names = {end[-1] for end in ends if end}
    found = (path for path in folder.rglob("*") if path.name in names)
    roots = {
        path.parents[len(end) - 1]
        for path in found
        for end in ends
        if end and path.parts[-len(end) :] == end
    }
    return sorted(roots)


def is_file(path: Path) -> bool:
    """Return whether the file exists; False if its name is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def unlisted_images(folder: Path, listed: set[Path]) -> list[Path]:
    """Return the image files below `folder` that no annotation file names."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file() and path not in listed
    )
