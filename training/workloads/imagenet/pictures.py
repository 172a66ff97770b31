"""Draws pictures of eight patterns, so that a classifier can be trained without a download.

Each is a function of (seed, index): a pattern of random scale, place and lighting, a little turned,
in two random colors, with noise, as a JPEG. Imports no torch.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from training.dataset_output import FolderOutput, clean_up
from training.errors import UserError
from training.workloads.imagenet.images import Encoded
from training.workloads.imagenet.packing import Packing, pack

if TYPE_CHECKING:
    from training.workload import Progress

Values: TypeAlias = NDArray[np.float64]
# Coordinates in units of the pattern -> the share of the second color, from 0 to 1.
_Pattern: TypeAlias = Callable[[Values, Values], Any]
_QUALITY = 90
_VALIDATION_EVERY = 5


def _wave(x: Values) -> Values:
    return 0.5 + 0.5 * np.cos(2 * np.pi * x)


def _bricks(x: Values, y: Values) -> Any:
    shifted = x / 2 + 0.5 * (np.floor(y) % 2)
    return (np.abs(shifted % 1 - 0.5) < 0.43) & (np.abs(y % 1 - 0.5) < 0.4)


def _dots(x: Values, y: Values) -> Any:
    return np.hypot(x % 1 - 0.5, y % 1 - 0.5) < 0.32


CLASSES: Mapping[str, _Pattern] = MappingProxyType(
    {
        "bricks": _bricks,
        "checks": lambda x, y: (np.floor(x) + np.floor(y)) % 2,
        "dots": _dots,
        "plaid": lambda x, y: (_wave(x) + _wave(y)) / 2,
        "rays": lambda x, y: _wave(np.arctan2(y, x) * 6 / np.pi),
        "rings": lambda x, y: _wave(np.hypot(x, y)),
        "stripes": lambda x, y: _wave(x),
        "zigzags": lambda x, y: _wave(x + np.abs(y % 2 - 1)),
    }
)


def make_dataset(out: Path, count: int, seed: int, progress: "Progress") -> Mapping[str, Any]:
    """Draw and pack `count` pictures, every fifth of a class for validation; return the meta."""
    least = 2 * _VALIDATION_EVERY * len(CLASSES)
    if count < least:
        raise UserError(f"count is {count}; give at least {least} ({len(CLASSES)} classes)")
    if seed < 0:
        raise UserError(f"seed is {seed}; give 0 or more")
    splits: dict[str, list[_Drawn]] = {"train": [], "validation": []}
    for index in range(count):
        is_held_out = index // len(CLASSES) % _VALIDATION_EVERY == 0
        drawn = _Drawn(seed=seed, index=index)
        splits["validation" if is_held_out else "train"].append(drawn)
    packing = Packing(
        splits=splits,
        classes=list(CLASSES),
        seed=seed,
        options={"drawn": count},
        source=[],
    )
    output = FolderOutput(out)
    finished = pack(packing, output, progress)
    clean_up(output)
    return finished.meta


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drawn:
    """A picture that is drawn in the process which packs it."""

    seed: int
    index: int

    @property
    def name(self) -> str:
        return f"picture {self.index}"

    @property
    def label(self) -> int:
        return self.index % len(CLASSES)

    def make(self) -> Encoded:
        return draw(self.seed, self.index)


def draw(seed: int, index: int) -> Encoded:
    """The JPEG of picture `index`."""
    rng = np.random.default_rng([seed, index])
    width, height = (int(side) for side in rng.integers(72, 128, 2))
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    # A pattern is seen from somewhere in its middle, at an angle.
    x, y = x - width * rng.uniform(0.2, 0.8), y - height * rng.uniform(0.2, 0.8)
    angle, unit = rng.uniform(-0.4, 0.4), rng.uniform(10, 18)
    u = (np.cos(angle) * x + np.sin(angle) * y) / unit
    v = (np.cos(angle) * y - np.sin(angle) * x) / unit
    pattern = list(CLASSES.values())[index % len(CLASSES)]
    share = np.asarray(pattern(u, v), np.float64)[..., None]
    first, second = _two_colors(rng)
    light = 1 + 0.3 * np.cos(rng.uniform(0, 2 * np.pi) + x / width * rng.uniform(1, 4))[..., None]
    pixels = (first + share * (second - first)) * light + rng.normal(0, 14, (height, width, 3))
    encoded = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=_QUALITY)
    return Encoded(jpeg=encoded.getvalue(), num_pixels=width * height, is_converted=False)


def _two_colors(rng: np.random.Generator) -> tuple[Values, Values]:
    """A dark color and a light one."""
    return rng.uniform(10, 120, 3), rng.uniform(135, 245, 3)
