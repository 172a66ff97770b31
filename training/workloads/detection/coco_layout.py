"""Finds the files of a folder in COCO's format, as COCO, Roboflow, CVAT or Label Studio lay it out.

An annotation file belongs to a split by its name, or by that of its folder; one without is divided
when it is imported. Images are looked for next to it and in folders named like the split.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from training.errors import UserError
from training.workloads.detection.coco_faults import CocoFaults, refuse_layout

# What an import divides into the splits.
UNDIVIDED = "all"
_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}
# COCO's own files about other tasks, and files that hold no annotations.
_OTHER = re.compile(r"^(captions|person_keypoints|panoptic|stuff|image_info)_|^manifest$|^\.")
_IMAGES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif"})
# Enough names to see in which folder the images are.
_TRIED = 50


class Source(NamedTuple):
    """An annotation file and the split that it describes."""

    split: str
    path: Path


def find_sources(folder: Path, faults: CocoFaults) -> tuple[Path, list[Source]]:
    """The folder's annotation files by split, and the folder itself or the only one inside it."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}; give the folder of a dataset in COCO's format")
    found = list(_candidates(folder))
    if not found:
        inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
        if len(inside) == 1 and inside[0].is_dir():
            return find_sources(inside[0], faults)
        raise refuse_layout(f"{folder} has no annotation file in COCO's format")
    if any(source.split != UNDIVIDED for source in found):
        for source in found:
            if source.split == UNDIVIDED:
                faults.add("unread-file", f"{source.path.relative_to(folder)} names no split")
        found = [source for source in found if source.split != UNDIVIDED]
    by_split: dict[str, Path] = {}
    for split, path in found:
        if split in by_split:
            names = f"{by_split[split].relative_to(folder)} and {path.relative_to(folder)}"
            what = "are both of one dataset" if split == UNDIVIDED else f"both describe {split}"
            raise UserError(f"{names} {what}; leave one of them there")
        by_split[split] = path
    if UNDIVIDED not in by_split and (lacks := {"train", "validation"} - by_split.keys()):
        raise refuse_layout(f"{folder} has no annotations for {' and '.join(sorted(lacks))}")
    return folder, [Source(split, by_split[split]) for split in _order(by_split)]


def _order(by_split: dict[str, Path]) -> list[str]:
    known = ("train", "validation", "test", UNDIVIDED)
    return [split for split in known if split in by_split]


def _candidates(folder: Path) -> Iterator[Source]:
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        if _OTHER.search(path.stem) or path.parent.name.startswith("."):
            continue
        split = _split_of(path.stem)
        if split is None and path.parent != folder:
            split = _split_of(path.parent.name)
        yield Source(split or UNDIVIDED, path)


def _split_of(name: str) -> str | None:
    """The split that a name's words name: instances_train2017 names train."""
    words = re.findall(r"[a-z]+", name.lower())
    named = {_SPLITS[word] for word in words if word in _SPLITS}
    return named.pop() if len(named) == 1 else None


def find_images(folder: Path, source: Source, files: list[str]) -> Path:
    """The folder that the image files of an annotation file are relative to: where most are."""
    beside = source.path.parent
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    own = [name for name in sorted(names) if _split_of(name) == source.split]
    roots = [beside, *(folder / name for name in own), folder, folder / "images", beside / "images"]
    for images in (folder / "images", folder / "data", folder):
        if images.is_dir():
            inside = sorted(path for path in images.iterdir() if path.is_dir())
            roots += [p for p in inside if _split_of(p.name) == source.split or p.name == "default"]
    tried = files[:: max(1, len(files) // _TRIED)]
    there = [sum(is_file(root / file) for file in tried) for root in roots]
    if not any(there):  # then where somebody would look for them
        name = "images" if source.split == UNDIVIDED else source.split
        return folder / (own[0] if own else name)
    return roots[there.index(max(there))]


def is_file(path: Path) -> bool:
    """Whether it is there; one with a name that is too long is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def unlisted_images(folder: Path, listed: set[Path]) -> list[Path]:
    """Image files below `folder` that no annotation file names."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in _IMAGES and path.is_file() and path not in listed
    )
