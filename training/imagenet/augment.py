"""A JPEG -> uint8 pixels in the size that a model sees; all chance comes from the sample's rng.

Legend: C channels, H height, W width.
"""

import math

import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as F

# torchvision's own defaults, of Szegedy et al. 2014, https://arxiv.org/abs/1409.4842
AREA = (0.25, 1.0)
ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
# An evaluated image is the middle of one this much larger.
EVAL_RATIO = 0.875


def decode(jpeg: bytes) -> Tensor:
    """The image, uint8 [3, H, W]; RuntimeError if it is none."""
    encoded = torch.frombuffer(bytearray(jpeg), dtype=torch.uint8)
    return decode_jpeg(encoded, mode=ImageReadMode.RGB)


def train_image(image_CHW: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """A random part of the image, resized to `size`, perhaps mirrored."""
    top, left, height, width = random_box(*image_CHW.shape[-2:], rng)
    part_CHW = F.resized_crop(image_CHW, top, left, height, width, [size, size], antialias=True)
    return F.horizontal_flip(part_CHW) if float(torch.rand((), generator=rng)) < 0.5 else part_CHW


def eval_image(image_CHW: Tensor, size: int) -> Tensor:
    """The middle of the image, its shorter side resized to `size` / EVAL_RATIO."""
    resized_CHW = F.resize(image_CHW, [round(size / EVAL_RATIO)], antialias=True)
    return F.center_crop(resized_CHW, [size, size])


def random_box(height: int, width: int, rng: torch.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a part of a random area and aspect."""
    for _ in range(_TRIES):
        share, aspect, y, x = torch.rand(4, generator=rng).tolist()
        area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * share)
        low, high = (math.log(ratio) for ratio in ASPECT)
        ratio = math.exp(low + (high - low) * aspect)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(y * (height - h + 1)), int(x * (width - w + 1)), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side
