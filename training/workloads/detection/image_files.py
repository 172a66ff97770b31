"""Reads image files as RGB, in the orientation in which their boxes were drawn.

A camera's file may say that it must be rotated (EXIF). Not all tools do that; the size in the
annotations shows which pixels were meant. Imports no torch.

Finds the images that annotations name: on another machine, in another form of Unicode (a Mac
decomposes names), in a parallel tree. What a name leaves open is never guessed.
"""

import hashlib
import io
import os
import re
import struct
from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from contract.errors import UserError
from contract.file_names import HEIC, composed, is_visible, walked
from training.durable import Tally

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif"})
_ORIENTATION = 0x0112
UPRIGHT = 1
_TURNED = frozenset({5, 6, 7, 8})  # by a quarter, which swaps width and height
# Pillow warns from here on: this many pixels may be an attack, and fit no model.
_MAX_PIXELS = 89_478_485
# The errors that Pillow raises for damaged files; RuntimeError for AVIF.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, EOFError, RuntimeError, struct.error),
    Image.DecompressionBombError,
)
_EIGHT_BITS = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})


class ImageFault(NamedTuple):
    """A fault of an image file: a rule of coco_faults.py and a clause."""

    rule: str
    text: str


class StoredSize(NamedTuple):
    """An image file's width and height as its pixels are stored, and its EXIF orientation."""

    size: tuple[int, int]
    orientation: int

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height as displayed."""
        return self.size[::-1] if self.orientation in _TURNED else self.size


def upright_size(path: Path) -> tuple[int, int] | None:
    """Return height and width as displayed; None if the file cannot be opened."""
    try:
        with Image.open(path) as image:
            width, height = StoredSize(image.size, _orientation(image)).upright
    except _DAMAGED:
        return None
    return height, width


def read_rgb(path: Path, height: int, width: int) -> Image.Image:
    """Return the image in the annotated size; UserError if the file does not have it."""
    with Tally.timed("read"):
        content = path.read_bytes()
    try:
        with Tally.timed("decode"), Image.open(io.BytesIO(content)) as image:
            return _as_annotated(image, height, width).convert("RGB")
    except _DAMAGED as error:
        raise UserError(
            f"{path} cannot be read as an image of {width}x{height}: {error}; find all such files "
            "with `python -m training data check --workload detection FOLDER`"
        ) from error


def examine(path: Path) -> tuple[str, StoredSize | None, list[ImageFault]]:
    """Decode every pixel; return the file's checksum, its size and what is wrong with it."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    try:
        with Image.open(io.BytesIO(content)) as image:
            mode, stored = image.mode, StoredSize(image.size, _orientation(image))
            if image.width * image.height > _MAX_PIXELS:
                text = f"has {image.width}x{image.height} pixels"
                return digest, None, [ImageFault("too-large", text)]
            is_transparent = mode in ("LA", "PA", "RGBA") or "transparency" in image.info
            image.load()
    except UnidentifiedImageError:
        text = "is not an image that Pillow can read"
        if content[4:8] == b"ftyp" and content[8:12] in HEIC:
            text = "is HEIC, Apple's format, which Pillow cannot read"
        return digest, None, [ImageFault("unreadable-image", text)]
    except _DAMAGED as error:
        return digest, None, [ImageFault("unreadable-image", f"cannot be decoded: {error}")]
    faults = []
    if mode not in _EIGHT_BITS:
        faults.append(ImageFault("pixel-format", f"has pixels of the kind {mode}"))
    elif is_transparent:
        faults.append(ImageFault("transparency", "has transparent pixels"))
    return digest, stored, faults


def _as_annotated(image: Image.Image, height: int, width: int) -> Image.Image:
    """Return the image upright; as it is stored if only that has the annotated size."""
    stored = StoredSize(image.size, _orientation(image))
    if stored.upright == (width, height):
        return image if stored.orientation == UPRIGHT else ImageOps.exif_transpose(image)
    if stored.size == (width, height):
        return image
    raise ValueError(f"it has {image.size[0]}x{image.size[1]} pixels")


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":  # Pillow turns it itself
        return UPRIGHT
    orientation = image.getexif().get(_ORIENTATION, UPRIGHT)
    return orientation if orientation in range(1, 9) else UPRIGHT


# What Label Studio puts before the name of an upload.
_UPLOAD = re.compile(r"[0-9a-f]{8}-(?=.)")


def visible_files(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted, without hidden ones and a Mac's own."""
    found = list[Path]()
    for below, folders, names in walked(folder):
        folders[:] = filter(is_visible, folders)
        found += (Path(below, name) for name in filter(is_visible, names))
    return sorted(found)


def is_file(path: Path) -> bool:
    """Return whether the file exists; False if its name is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


class NamedImages:
    """The images below a folder, by the names that annotation files give them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = [p for p in visible_files(folder) if p.suffix.lower() in IMAGE_SUFFIXES]
        self._place: dict[str, Path] = {}
        self._called = defaultdict[str, list[Path]](list)
        for path in self.paths:
            self._place["/".join(self._parts(path))] = path
            for name in {composed(path.name), composed(path.stem)}:
                self._called[name].append(path)

    def _parts(self, path: Path) -> tuple[str, ...]:
        return tuple(map(composed, path.relative_to(self.folder).parts))

    def at(self, path: Path) -> list[Path]:
        """Return the image at exactly this path, in any form of Unicode."""
        place = composed(os.path.relpath(path, self.folder).replace(os.sep, "/"))
        return [self._place[place]] if place in self._place else []

    def has(self, path: Path) -> bool:
        """Return whether there is a file at this path, or an image in any form of Unicode."""
        return is_file(path) or bool(self.at(path))

    def find(self, named: str, near: Path, hint: str = "") -> list[Path]:
        """Return the image that a file in the folder `near` names; several if that is unclear.

        Its path from there decides, then the longest end of it, then the folders that both share
        (Annotations/a and JPEGImages/a), then an image's folder of the name `hint`.
        """
        named = composed(named).replace("\\", "/")
        parts = tuple(part for part in named.split("/") if part not in ("", ".", ".."))
        if not parts or (there := self.at(near / named)):
            return there if parts else []
        called = self._called.get(parts[-1]) or self._called.get(_UPLOAD.sub("", parts[-1])) or []
        around = self._parts(near)

        def nearness(path: Path) -> tuple[int, bool, int, bool]:
            own = self._parts(path)
            shared = _same(own[:-1], around) + _same(own[-2::-1], around[::-1])
            return _same(own[::-1], parts[::-1]), own == parts, shared, hint in own[-2:-1]

        scored = [(nearness(path), path) for path in called]
        best = max((score for score, _ in scored), default=None)
        return [path for score, path in scored if score == best]


def _same(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the equal parts with which both begin."""
    return len([*takewhile(bool, map(eq, one, other))])
