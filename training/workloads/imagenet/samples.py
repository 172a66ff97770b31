"""One split of the images as samples: uint8 pixels, the class, and if another image stands in.

Pixels stay as decoded, channels last, and are normalized on the device. An image that cannot be
decoded is replaced by one that seed and index determine; one that cannot be read never is.
simplejpeg and, where it is missing, Pillow decode the same bits. C channels, H height, W width.
"""

import io
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from contract.errors import UserError
from training import Order, Samples, derive_seed, drawing_from
from training.durable import Tally
from training.workloads.imagenet.packing import ImageOptions, Shards, encode, shuffled_by_windows

_log = logging.getLogger(__name__)
# The dataset counts as damaged if this many images in a row cannot be decoded, or more than this
# share of those read; a few are replaced whatever their share.
_MAX_REPLACEMENTS = 4
_MAX_REPLACED_SHARE = 0.01
_ALWAYS_REPLACED = 8
# The defaults of torchvision and FFCV, after Szegedy et al. 2014, https://arxiv.org/abs/1409.4842
_AREA = (0.08, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
# An evaluated image is the middle of a larger one, and has this share of its side.
EVAL_RATIO = 0.875
# A third faster than Pillow; torchvision's decoders are deprecated since 0.29.
_simplejpeg = import_module("simplejpeg") if find_spec("simplejpeg") else None
if _simplejpeg is None:
    _log.warning(
        "simplejpeg is not installed, so Pillow decodes the images, which takes 1.5 times as long"
    )


class _Replacements:
    """The number of images that this process has read, and those that were replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_read = 0
        self._replaced = set[int]()

    def read(self) -> None:
        with self._lock:
            self._num_read += 1

    def add(self, image: str, number: int, why: Exception) -> None:
        """Log a replaced image once; UserError if there are too many."""
        with self._lock:
            is_new = number not in self._replaced
            self._replaced.add(number)
            num, of = len(self._replaced), self._num_read
        if is_new:
            _log.warning("%s cannot be decoded (%s); another stands in for it", image, why)
        if num > max(_ALWAYS_REPLACED, _MAX_REPLACED_SHARE * of):
            raise UserError(
                f"{num} of {of} images that a process read cannot be decoded, the last {image}; "
                "import the dataset again"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSamples(Samples):
    """The images of a split; `size` gives the side in an epoch (-1: evaluation)."""

    shards: Shards
    size: Callable[[int], int]
    window: int
    seed: int
    augment: v2.Transform | None = None
    replacements: _Replacements = field(default_factory=_Replacements)

    def __len__(self) -> int:
        return len(self.shards)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Mapping[str, Any]:
        """Return the image in its epoch's size, augmented unless it is evaluated."""
        image_HWC, number = self._decoded(index)
        side = self.size(epoch)
        pixels = _eval_image(image_HWC, side) if epoch < 0 else _train_image(image_HWC, side, rng)
        if self.augment is not None and epoch >= 0:
            with drawing_from(rng):
                pixels = self.augment(pixels.permute(2, 0, 1)).permute(1, 2, 0)
        return {
            "images": pixels,
            "labels": self.shards.label(number),
            "ids": number,
            "replaced": int(number != index),
        }

    def order(self, epoch: int, seed: int) -> Order:
        """Put shards in random order, and shuffle images within `window` shards."""
        generator = np.random.default_rng(derive_seed("order", seed, epoch))
        return shuffled_by_windows(self.shards.index["shard"], self.window, generator)

    def files(self, indices: Order) -> Sequence[str]:
        """Return the shards of these images, in the order in which they are first needed."""
        return self.shards.files(np.asarray(indices, np.int64))

    def _decoded(self, index: int) -> tuple[Tensor, int]:
        """Return the image and its number, which differs from `index` if it stands in."""
        number = index
        self.replacements.read()
        for attempt in range(_MAX_REPLACEMENTS + 1):
            with Tally.timed("read"):
                jpeg = self.shards.read(number)
            try:
                with Tally.timed("decode"):
                    return decode(jpeg), number
            except ValueError as error:
                Tally.count("replaced")
                self.replacements.add(self.shards.describe(number), number, error)
                number = derive_seed("replacement", self.seed, index, attempt) % len(self)
        raise UserError(
            f"{self.shards.describe(index)} and {_MAX_REPLACEMENTS} images drawn in its place "
            "cannot be decoded; import the dataset again"
        )


def evaluated_image(content: bytes, size: int) -> Tensor:
    """Return a user's image file as an evaluation sees it; NoImageError if it cannot be decoded."""
    return _eval_image(decode(encode(content, 0, ImageOptions().quality).jpeg), size).contiguous()


def _train_image(image_HWC: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """Return a random part of the image, resized to `size` and perhaps mirrored."""
    top, left, height, width = _random_box(image_HWC.shape[0], image_HWC.shape[1], rng)
    part_HWC = image_HWC[top : top + height, left : left + width]
    resized_HWC = _resized(part_HWC, size, size)
    return resized_HWC.flip(1) if float(torch.rand((), generator=rng)) < 0.5 else resized_HWC


def _eval_image(image_HWC: Tensor, size: int) -> Tensor:
    """Return the middle of the image, with the shorter side resized to `size` / EVAL_RATIO."""
    height, width = image_HWC.shape[:2]
    side = round(size / EVAL_RATIO)
    if height < width:
        resized_HWC = _resized(image_HWC, side, int(side * width / height))
    else:
        resized_HWC = _resized(image_HWC, int(side * height / width), side)
    top, left = (round((length - size) / 2) for length in resized_HWC.shape[:2])
    return resized_HWC[top : top + size, left : left + size]


def _resized(image_HWC: Tensor, height: int, width: int) -> Tensor:
    """Do what torchvision's `resize` with antialias does, in HWC and without its dispatch."""
    image_1CHW = image_HWC.unsqueeze(0).permute(0, 3, 1, 2)
    resized_1CHW = F.interpolate(
        image_1CHW, size=(height, width), mode="bilinear", align_corners=False, antialias=True
    )
    return resized_1CHW[0].permute(1, 2, 0)


def _random_box(height: int, width: int, rng: torch.Generator) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a part with random area and aspect."""
    for _ in range(_TRIES):
        share, aspect, y, x = torch.rand(4, generator=rng).tolist()
        area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * share)
        low, high = (math.log(ratio) for ratio in _ASPECT)
        ratio = math.exp(low + (high - low) * aspect)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(y * (height - h + 1)), int(x * (width - w + 1)), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def decode(jpeg: bytes) -> Tensor:
    """Decode to RGB, uint8 [H, W, 3]; ValueError for anything except a complete JPEG."""
    if _simplejpeg is not None:
        try:
            return torch.from_numpy(_simplejpeg.decode_jpeg(jpeg, strict=True))
        except ValueError:
            pass  # libjpeg's warnings are not always damage; Pillow decides, on every machine
    return torch.from_numpy(_decode_with_pillow(jpeg))


def _decode_with_pillow(jpeg: bytes) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Do the same with Pillow alone."""
    try:
        with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
            return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"not a JPEG: {error}") from error
