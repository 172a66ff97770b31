"""One split of the images as samples: uint8 pixels, the class, and whether another stands in.

Normalization is the device's work. An image that cannot be decoded is replaced by one that seed and
index name; a read that fails is never replaced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.errors import UserError
from training.imagenet.augment import decode, eval_image, train_image
from training.imagenet.shards import ShardReader, index_name, read_index, shuffled_by_windows
from training.randomness import derive_seed
from training.stacking import stack
from training.tally import count, timed
from training.workload import Dataset, Order

# After so many images in a row that cannot be decoded it is the dataset that is damaged.
_MAX_REPLACEMENTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSamples:
    """The images of a split; `size` gives the side in an epoch (-1: evaluation)."""

    reader: ShardReader
    index: NDArray[Any]
    size: Callable[[int], int]
    window: int
    seed: int

    def __len__(self) -> int:
        return len(self.index)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Mapping[str, Any]:
        """The image in its epoch's size, augmented unless it is evaluated."""
        image_HWC, number, replaced = self._decoded(index)
        side = self.size(epoch)
        pixels = eval_image(image_HWC, side) if epoch < 0 else train_image(image_HWC, side, rng)
        return {
            "images": pixels,
            "labels": int(self.index[number]["label"]),
            "ids": number,
            "replaced": replaced,
        }

    collate = staticmethod(stack)

    def order(self, epoch: int, seed: int) -> Order:
        """Shards in random order, images shuffled within `window` shards."""
        generator = np.random.default_rng(derive_seed("order", seed, epoch))
        return shuffled_by_windows(self.index["shard"], self.window, generator)

    def _decoded(self, index: int) -> tuple[Tensor, int, int]:
        """The image, its number, and 1 if it stands in for `index`."""
        number = index
        for attempt in range(_MAX_REPLACEMENTS + 1):
            with timed("read"):
                jpeg = self.reader.read(number)
            try:
                with timed("decode"):
                    return decode(jpeg), number, int(attempt > 0)
            except RuntimeError:
                count("replaced")
                number = derive_seed("replacement", self.seed, index, attempt) % len(self)
        raise UserError(
            f"image {index} of the dataset and {_MAX_REPLACEMENTS} drawn in its place cannot be "
            "decoded; verify it with `python -m training data check`"
        )


def image_samples(
    dataset: Dataset, split: str, size: Callable[[int], int], *, window: int, seed: int
) -> ImageSamples:
    """The samples of a split; shards are opened when they are read first."""
    index = read_index(dataset.file(index_name(split)), len(dataset.meta["classes"]))
    return ImageSamples(
        reader=ShardReader(dataset.file, split, index),
        index=index,
        size=size,
        window=window,
        seed=seed,
    )
