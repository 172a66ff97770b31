"""The reference's augmentation, as of DETR: flip, resize at random, or crop first; boxes follow.

Draws from the sample's generator alone. A sample is cut and resized in one go, so a box is exact:
its corners are mapped, nothing is rounded.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

# A box that is less than this wide or high in the resized image is not learned: no pixel is its
# own. It is dropped, and so is what a crop has left of it.
_MIN_BOX_PIXELS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """Sizes in pixels of an image's shorter side; the longer one has at most `longest_side`.

    With probability `crop` a rectangle with sides between `crop_sides` is cut first, out of the
    image resized to one of `crop_scales`. Evaluated images are resized to `eval_scale`.
    """

    scales: tuple[int, ...] = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    longest_side: int = 1333
    flip: float = 0.5
    crop: float = 0.5
    crop_scales: tuple[int, ...] = (400, 500, 600)
    crop_sides: tuple[int, int] = (384, 600)
    eval_scale: int = 800


class _View(NamedTuple):
    """What of an image is seen, in its own pixels, at which size, and whether mirrored."""

    left: float
    top: float
    right: float
    bottom: float
    height: int
    width: int
    is_flipped: bool


def whole(height: int, width: int, augmentation: Augmentation) -> _View:
    """The image as it is evaluated."""
    to_height, to_width = resized(height, width, augmentation.eval_scale, augmentation.longest_side)
    return _View(0, 0, width, height, to_height, to_width, False)


def drawn(height: int, width: int, augmentation: Augmentation, rng: torch.Generator) -> _View:
    """A view of the image at random, as it is trained on."""
    is_flipped = _chance(augmentation.flip, rng)
    left, top, right, bottom = 0.0, 0.0, float(width), float(height)
    if _chance(augmentation.crop, rng):
        scale = _choice(augmentation.crop_scales, rng)
        high, wide = resized(height, width, scale, None)
        least, most = augmentation.crop_sides
        w, h = (_between(min(least, side), min(most, side), rng) for side in (wide, high))
        x, y = _between(0, wide - w, rng), _between(0, high - h, rng)
        left, right = x * width / wide, (x + w) * width / wide
        top, bottom = y * height / high, (y + h) * height / high
    scale = _choice(augmentation.scales, rng)
    to_height, to_width = resized(bottom - top, right - left, scale, augmentation.longest_side)
    return _View(left, top, right, bottom, to_height, to_width, is_flipped)


def resized(height: float, width: float, shorter: int, longest: int | None) -> tuple[int, int]:
    """Height and width with that shorter side, or a smaller one if the longest would be larger."""
    low, high = min(height, width), max(height, width)
    if longest is not None and high / low * shorter > longest:
        shorter = max(1, round(longest * low / high))
    longer = max(1, int(shorter * high / low))
    if longest is not None:
        longer = min(longer, longest)
    return (shorter, longer) if height <= width else (longer, shorter)


def see(image: Image.Image, view: _View) -> Image.Image:
    """The part of the image that the view shows, at its size."""
    box = (view.left, view.top, view.right, view.bottom)
    seen = image.resize((view.width, view.height), Image.Resampling.BILINEAR, box=box)
    if view.is_flipped:
        return seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return seen


def seen_boxes(boxes_N4: Tensor, view: _View) -> tuple[Tensor, Tensor]:
    """Boxes x, y, width, height in the image's pixels -> cx, cy, w, h as shares of the view.

    They are cut at its border; the second result says which are kept (`_MIN_BOX_PIXELS`).
    """
    x, y, w, h = boxes_N4.double().unbind(1)
    across, down = view.right - view.left, view.bottom - view.top
    left, right = (((side - view.left) / across).clamp(0, 1) for side in (x, x + w))
    top, bottom = (((side - view.top) / down).clamp(0, 1) for side in (y, y + h))
    if view.is_flipped:
        left, right = 1 - right, 1 - left
    wide, high = right - left, bottom - top
    # Not exactly at the limit: rounding would decide.
    least = _MIN_BOX_PIXELS * (1 - 1e-9)
    is_kept = (wide * view.width >= least) & (high * view.height >= least)
    found_N4 = torch.stack([(left + right) / 2, (top + bottom) / 2, wide, high], dim=1)
    return found_N4.float(), is_kept


def _chance(probability: float, rng: torch.Generator) -> bool:
    return bool(torch.rand((), generator=rng) < probability)


def _between(least: int, most: int, rng: torch.Generator) -> int:
    return int(torch.randint(least, most + 1, (), generator=rng))


def _choice(values: tuple[int, ...], rng: torch.Generator) -> int:
    return values[_between(0, len(values) - 1, rng)]
