"""One split of the images as samples: uint8 pixels, the class, and whether another stands in.

Normalization is the device's work. An image that cannot be decoded is replaced by one that seed and
index name; a read that fails is never replaced.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.errors import UserError
from training.randomness import derive_seed
from training.tally import count, timed
from training.workload import Dataset, Order, Samples
from training.workloads.imagenet.augment import eval_image, train_image
from training.workloads.imagenet.decoding import decode
from training.workloads.imagenet.shards import Shards, shuffled_by_windows

_log = logging.getLogger(__name__)
# It is the dataset that is damaged where so many images in a row cannot be decoded, or more than
# this share of those that were read; a few are replaced whatever their share.
_MAX_REPLACEMENTS = 4
_MAX_REPLACED_SHARE = 0.01
_ALWAYS_REPLACED = 8


class _Replacements:
    """How many images this process has read, and which of them others stand in for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_read = 0
        self._replaced = set[int]()

    def read(self) -> None:
        with self._lock:
            self._num_read += 1

    def add(self, image: str, number: int, why: Exception) -> None:
        """Log an image once; UserError above the share."""
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
    replacements: _Replacements = field(default_factory=_Replacements)

    def __len__(self) -> int:
        return len(self.shards)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Mapping[str, Any]:
        """The image in its epoch's size, augmented unless it is evaluated."""
        image_HWC, number = self._decoded(index)
        side = self.size(epoch)
        pixels = eval_image(image_HWC, side) if epoch < 0 else train_image(image_HWC, side, rng)
        return {
            "images": pixels,
            "labels": self.shards.label(number),
            "ids": number,
            "replaced": int(number != index),
        }

    def order(self, epoch: int, seed: int) -> Order:
        """Shards in random order, images shuffled within `window` shards."""
        generator = np.random.default_rng(derive_seed("order", seed, epoch))
        return shuffled_by_windows(self.shards.index["shard"], self.window, generator)

    def files(self, indices: Order) -> Sequence[str]:
        """The shards of these images, in the order in which they are needed first."""
        return self.shards.files(np.asarray(indices, np.int64))

    def _decoded(self, index: int) -> tuple[Tensor, int]:
        """The image and its number, which is another than `index` if it stands in for it."""
        number = index
        self.replacements.read()
        for attempt in range(_MAX_REPLACEMENTS + 1):
            with timed("read"):
                jpeg = self.shards.read(number)
            try:
                with timed("decode"):
                    return decode(jpeg), number
            except ValueError as error:
                count("replaced")
                self.replacements.add(self.shards.describe(number), number, error)
                number = derive_seed("replacement", self.seed, index, attempt) % len(self)
        raise UserError(
            f"{self.shards.describe(index)} and {_MAX_REPLACEMENTS} images drawn in its place "
            "cannot be decoded; import the dataset again"
        )


def image_samples(
    dataset: Dataset, split: str, size: Callable[[int], int], *, window: int, seed: int
) -> ImageSamples:
    """The samples of a split; shards are opened when they are read."""
    return ImageSamples(shards=Shards(dataset, split), size=size, window=window, seed=seed)
