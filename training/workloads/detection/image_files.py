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

from training.errors import UserError
from training.tally import timed

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif"})
_ORIENTATION = 0x0112
_UPRIGHT = 1
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
    """What is wrong with an image file: a rule of coco_faults.py and a clause."""

    rule: str
    text: str


def upright_size(path: Path) -> tuple[int, int] | None:
    """Return height and width as displayed; None if the file cannot be opened."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            is_turned = _orientation(image) in _TURNED
    except _DAMAGED:
        return None
    return (width, height) if is_turned else (height, width)


def read_rgb(path: Path, height: int, width: int) -> Image.Image:
    """Return the image in the annotated size; UserError if the file does not have it."""
    with timed("read"):
        content = path.read_bytes()
    try:
        with timed("decode"), Image.open(io.BytesIO(content)) as image:
            return _as_annotated(image, height, width).convert("RGB")
    except _DAMAGED as error:
        raise UserError(
            f"{path} cannot be read as an image of {width}x{height}: {error}; find all such files "
            "with `python -m training data check --workload detection FOLDER`"
        ) from error


def examine(path: Path, height: int, width: int) -> tuple[str, list[ImageFault]]:
    """Decode every pixel; return the file's checksum and what is wrong with it."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    try:
        with Image.open(io.BytesIO(content)) as image:
            stored, mode, orientation = image.size, image.mode, _orientation(image)
            if stored[0] * stored[1] > _MAX_PIXELS:
                text = f"has {stored[0]}x{stored[1]} pixels"
                return digest, [ImageFault("too-large", text)]
            is_transparent = mode in ("LA", "PA", "RGBA") or "transparency" in image.info
            image.load()
    except UnidentifiedImageError:
        return digest, [ImageFault("unreadable-image", "is not an image that Pillow can read")]
    except _DAMAGED as error:
        return digest, [ImageFault("unreadable-image", f"cannot be decoded: {error}")]
    faults = _size_faults(stored, orientation, height, width)
    if mode not in _EIGHT_BITS:
        faults.append(ImageFault("pixel-format", f"has pixels of the kind {mode}"))
    elif is_transparent:
        faults.append(ImageFault("transparency", "has transparent pixels"))
    return digest, faults


def _size_faults(
    stored: tuple[int, int], orientation: int, height: int, width: int
) -> list[ImageFault]:
    turned = orientation in _TURNED
    if stored == (width, height):
        # A quarter turn of an image that is not square would have changed the size.
        if orientation != _UPRIGHT and (not turned or width == height):
            return [ImageFault("orientation", f"must be rotated (EXIF orientation {orientation})")]
        return []
    if turned and stored == (height, width):
        return [ImageFault("upright", f"is stored rotated (EXIF orientation {orientation})")]
    text = f"has {stored[0]}x{stored[1]} pixels, but is annotated as {width}x{height}"
    return [ImageFault("image-size", text)]


def _as_annotated(image: Image.Image, height: int, width: int) -> Image.Image:
    if image.size == (width, height):
        return image
    if image.size == (height, width) and _orientation(image) in _TURNED:
        return ImageOps.exif_transpose(image)
    raise ValueError(f"it has {image.size[0]}x{image.size[1]} pixels")


def _orientation(image: Image.Image) -> int:
    orientation = image.getexif().get(_ORIENTATION, _UPRIGHT)
    return orientation if orientation in range(1, 9) else _UPRIGHT
