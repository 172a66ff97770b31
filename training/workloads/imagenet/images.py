"""Converts a user's image file to the JPEG that is packed; other files are refused.

A JPEG in RGB or grey whose shorter side is not above the requested one keeps its bytes. Everything
else (PNG, WebP, CMYK, a JPEG that must shrink) is encoded again. As in torchvision's ImageFolder, a
picture's transparency and its EXIF orientation are not applied. Imports no torch.
"""

import io
import warnings
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from contract.errors import UserError
from training import check_fields
from training.durable import Brought

_PLAIN = ("RGB", "L")


class NoImageError(ValueError):
    """A file cannot be packed; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """Options for `data import --override name=value`; 0 pixels: images keep their size."""

    shorter_side: int = 0
    # For the JPEGs that are encoded again.
    quality: int = 90
    # More non-images than this share are not an accident.
    left_out_share: float = 0.01
    # The classes of validation files without class folders: a CSV, or ILSVRC2012's devkit.
    validation_classes: str = ""

    def __post_init__(self) -> None:
        check_fields(self, at_least={0: ("shorter_side",)}, below_1=("left_out_share",))
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality is {self.quality}; give 1 to 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A JPEG that is packed, its pixels, and whether it was encoded again."""

    jpeg: bytes
    num_pixels: int
    is_converted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BroughtImage:
    """A user's image, which is read and encoded by the process that packs it."""

    file: Brought
    label: int
    options: ImageOptions

    @property
    def name(self) -> str:
        return self.file.name

    def make(self) -> Encoded:
        """Read and encode it; if reading fails, that is the machine's fault, not the file's."""
        try:
            content = self.file.read()
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(
                f"{self.name} cannot be read: {why}; give the same command again once it can"
            ) from error
        return encode(content, self.options.shorter_side, self.options.quality)


def encode(content: bytes, shorter_side: int, quality: int) -> Encoded:
    """Encode an image file as JPEG; it is fully decoded, so no damaged one is packed."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of large but accepted sizes, and of broken metadata.
            warnings.simplefilter("ignore")
            return _encode(content, shorter_side, quality)
    except UnidentifiedImageError as error:
        # Pillow's own message has a memory address, but the list of rejects is part of the dataset.
        raise NoImageError("cannot identify the image file") from error
    except (MemoryError, NoImageError):
        raise  # the machine's fault, or already explained
    except Exception as error:  # each of Pillow's formats has its own errors
        raise NoImageError(f"cannot be decoded: {error or type(error).__name__}") from error


def _encode(content: bytes, shorter_side: int, quality: int) -> Encoded:
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        width, height = image.size
        is_large = 0 < shorter_side < min(width, height)
        if image.format == "JPEG" and image.mode in _PLAIN and not is_large:
            return Encoded(jpeg=content, num_pixels=width * height, is_converted=False)
        plain = _plain(image)
    if is_large:
        scale = shorter_side / min(width, height)
        width, height = (max(shorter_side, round(side * scale)) for side in (width, height))
        plain = plain.resize((width, height), Image.Resampling.LANCZOS)
    encoded = io.BytesIO()
    plain.save(encoded, "JPEG", quality=quality)
    return Encoded(jpeg=encoded.getvalue(), num_pixels=width * height, is_converted=True)


def _plain(image: Image.Image) -> Image.Image:
    if image.mode in _PLAIN:
        return image
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        # Pillow would treat every value above 255 as white.
        image = image.convert("I").point(lambda value: value / 256)
        return image.convert("L")
    if image.mode in ("I", "F"):
        raise NoImageError("has 32 bits a pixel, of which nobody knows what is white")
    if image.mode == "P":
        # A palette with transparency needs its own channel first.
        image = image.convert("RGBA")
    return image.convert("RGB")
