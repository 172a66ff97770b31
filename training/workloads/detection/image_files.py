"""Reads image files as RGB, in the orientation in which their boxes were drawn.

A camera's file may say that it must be rotated (EXIF). Not all tools do that; the size in the
annotations shows which pixels were meant. Imports no torch.
"""

import hashlib
import io
import struct
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from contract.errors import UserError
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
