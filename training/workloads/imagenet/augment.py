"""uint8 pixels -> those in the size that a model sees; all chance comes from the sample's rng.

Pixels stay as a decoder gives them, channels last: no worker transposes them, and on the device
they are what convolutions want. Legend: C channels, H height, W width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# torchvision's own defaults, and FFCV's, of Szegedy et al. 2014, https://arxiv.org/abs/1409.4842
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
# An evaluated image is the middle of one this much larger.
EVAL_RATIO = 0.875


def train_image(image_HWC: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """A random part of the image, resized to `size`, perhaps mirrored."""
    top, left, height, width = random_box(image_HWC.shape[0], image_HWC.shape[1], rng)
    part_HWC = image_HWC[top : top + height, left : left + width]
    resized_HWC = _resized(part_HWC, size, size)
    return resized_HWC.flip(1) if float(torch.rand((), generator=rng)) < 0.5 else resized_HWC


def eval_image(image_HWC: Tensor, size: int) -> Tensor:
    """The middle of the image, its shorter side resized to `size` / EVAL_RATIO."""
    height, width = image_HWC.shape[:2]
    side = round(size / EVAL_RATIO)
    if height < width:
        resized_HWC = _resized(image_HWC, side, int(side * width / height))
    else:
        resized_HWC = _resized(image_HWC, int(side * height / width), side)
    top, left = (round((length - size) / 2) for length in resized_HWC.shape[:2])
    return resized_HWC[top : top + size, left : left + size]


def _resized(image_HWC: Tensor, height: int, width: int) -> Tensor:
    """The values of torchvision's `resize` with antialias, without its dispatch and in HWC."""
    image_1CHW = image_HWC.unsqueeze(0).permute(0, 3, 1, 2)
    resized_1CHW = F.interpolate(
        image_1CHW, size=(height, width), mode="bilinear", align_corners=False, antialias=True
    )
    return resized_1CHW[0].permute(1, 2, 0)


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
