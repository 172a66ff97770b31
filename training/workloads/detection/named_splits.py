"""Finds the splits that a dataset names itself: data.yaml, YOLO's lists, VOC's ImageSets.

They win over the names of folders. What another machine wrote is found by the end of its path; a
place without images is refused, as is an image that is named for two splits.
"""

import os
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.errors import UserError
from training.durable import split_within
from training.workloads.detection.image_files import IMAGE_SUFFIXES
from training.workloads.detection.yolo import lines

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
