"""One split of a dataset as samples: an image with its objects as shares of it; and augmentation.

In training (epoch 0 or later), a sample is augmented as in the reference (DETR) and has only what
can be learned: no crowds, no empty boxes. In evaluation (epoch -1), it is complete, with the truth
as annotated. Boxes follow exactly: images are cut and resized in one go, and box corners mapped.
B images, N objects of the image that has the most, M objects of all images.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from training import Dataset, Order, Samples
from training.workloads.detection.coco import Category, CocoSplit
from training.workloads.detection.image_files import read_rgb

# A box that is narrower or lower than this in the resized image, also after a crop, is dropped,
# because no pixel is entirely within it.
_MIN_BOX_PIXELS = 1.0


class _View(NamedTuple):
    """The part of an image that is seen, in its pixels, the target size, and if it is mirrored."""

    left: float
    top: float
    right: float
    bottom: float
    height: int
    width: int
    is_flipped: bool

    def of(self, image: Image.Image) -> Image.Image:
        """Return the part of the image that the view shows, in the view's size."""
        box = (self.left, self.top, self.right, self.bottom)
        seen = image.resize((self.width, self.height), Image.Resampling.BILINEAR, box=box)
        return seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.is_flipped else seen

    def boxes(self, boxes_N4: Tensor) -> tuple[Tensor, Tensor]:
        """Map boxes (x, y, width, height in image pixels) to cx, cy, w, h as shares of the view.

        They are cut at its border; the second result says which are kept (`_MIN_BOX_PIXELS`).
        """
        x, y, w, h = boxes_N4.double().unbind(1)
        across, down = self.right - self.left, self.bottom - self.top
        left, right = (((side - self.left) / across).clamp(0, 1) for side in (x, x + w))
        top, bottom = (((side - self.top) / down).clamp(0, 1) for side in (y, y + h))
        if self.is_flipped:
            left, right = 1 - right, 1 - left
        wide, high = right - left, bottom - top
        # Slightly below the limit, where rounding would otherwise decide.
        least = _MIN_BOX_PIXELS * (1 - 1e-9)
        is_kept = (wide * self.width >= least) & (high * self.height >= least)
        found_N4 = torch.stack([(left + right) / 2, (top + bottom) / 2, wide, high], dim=1)
        return found_N4.float(), is_kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """Sizes in pixels of an image's shorter side; the longer one has at most `longest_side`.

    With probability `crop`, a rectangle with sides between `crop_sides` is first cut out of the
    image resized to one of `crop_scales`. Evaluated images are resized to `eval_scale`.
    """

    scales: tuple[int, ...] = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    longest_side: int = 1333
    flip: float = 0.5
    crop: float = 0.5
    crop_scales: tuple[int, ...] = (400, 500, 600)
    crop_sides: tuple[int, int] = (384, 600)
    eval_scale: int = 800

    def whole(self, height: int, width: int) -> _View:
        """Return the view of the entire image, for evaluation."""
        to_height, to_width = _resized(height, width, self.eval_scale, self.longest_side)
        return _View(0, 0, width, height, to_height, to_width, False)

    def drawn(self, height: int, width: int, rng: torch.Generator) -> _View:
        """Draw a random view of the image, for training."""
        is_flipped = _chance(self.flip, rng)
        left, top, right, bottom = 0.0, 0.0, float(width), float(height)
        if _chance(self.crop, rng):
            high, wide = _resized(height, width, _choice(self.crop_scales, rng), None)
            least, most = self.crop_sides
            w, h = (_between(min(least, side), min(most, side), rng) for side in (wide, high))
            x, y = _between(0, wide - w, rng), _between(0, high - h, rng)
            left, right = x * width / wide, (x + w) * width / wide
            top, bottom = y * height / high, (y + h) * height / high
        scale = _choice(self.scales, rng)
        to_height, to_width = _resized(bottom - top, right - left, scale, self.longest_side)
        return _View(left, top, right, bottom, to_height, to_width, is_flipped)


def _resized(height: float, width: float, shorter: int, longest: int | None) -> tuple[int, int]:
    """Return the size with that shorter side, or a smaller one to keep within `longest`."""
    low, high = min(height, width), max(height, width)
    if longest is not None and high / low * shorter > longest:
        shorter = max(1, round(longest * low / high))
    longer = max(1, int(shorter * high / low))
    if longest is not None:
        longer = min(longer, longest)
    return (shorter, longer) if height <= width else (longer, shorter)


def _chance(probability: float, rng: torch.Generator) -> bool:
    return bool(torch.rand((), generator=rng) < probability)


def _between(least: int, most: int, rng: torch.Generator) -> int:
    return int(torch.randint(least, most + 1, (), generator=rng))


def _choice(values: tuple[int, ...], rng: torch.Generator) -> int:
    return values[_between(0, len(values) - 1, rng)]


Batch: TypeAlias = dict[str, Tensor]

# Pictures are kept of the first images of an evaluation.
_NUM_SHOWN = 12
# The label that pads an image's row of objects.
_NO_OBJECT = -1


class _Sample(NamedTuple):
    """An image as the model sees it, its objects, and its place in the split."""

    image: Tensor  # uint8 (3, H, W)
    labels: Tensor  # int64 (N,)
    boxes: Tensor  # float32 (N, 4): cx, cy, w, h as shares of the image
    number: int
    is_evaluated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectionSamples(Samples):
    """The images of a split. A batch is as large as its largest image, or as the next bucket.

    With `bucket`, both sides of a batch are multiples of that many pixels, so few shapes occur.
    """

    split: CocoSplit
    dataset: Dataset
    augmentation: Augmentation
    bucket: int = 1

    def __len__(self) -> int:
        return len(self.split)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> _Sample:
        """Return sample `index`, augmented by `rng`, or complete in epoch -1."""
        height, width = self.split.sizes[index].tolist()
        if epoch < 0:
            view = self.augmentation.whole(height, width)
        else:
            view = self.augmentation.drawn(height, width, rng)
        path = self.dataset.file(f"{self.split.name}/{self.split.files[index]}")
        seen = view.of(read_rgb(path, height, width))
        objects = self.split.objects(index)
        boxes, is_kept = view.boxes(torch.from_numpy(self.split.boxes[objects]))
        is_kept &= torch.from_numpy(~self.split.crowds[objects])
        return _Sample(
            image=torch.from_numpy(np.asarray(seen).copy()).permute(2, 0, 1),
            labels=torch.from_numpy(self.split.labels[objects])[is_kept],
            boxes=boxes[is_kept],
            number=index,
            is_evaluated=epoch < 0,
        )

    def collate(self, items: Sequence[_Sample]) -> Batch:
        """Join samples; images are padded below and on the right, objects with _NO_OBJECT."""
        height, width = (
            -(-max(item.image.shape[side] for item in items) // self.bucket) * self.bucket
            for side in (1, 2)
        )
        images = torch.zeros(len(items), 3, height, width, dtype=torch.uint8)
        most = max(len(item.labels) for item in items)
        labels = torch.full((len(items), most), _NO_OBJECT, dtype=torch.int64)
        boxes = torch.zeros(len(items), most, 4)
        for row, item in enumerate(items):
            _, h, w = item.image.shape
            images[row, :, :h, :w] = item.image
            labels[row, : len(item.labels)] = item.labels
            boxes[row, : len(item.labels)] = item.boxes
        indices = [item.number for item in items]
        batch = {
            "images": images,
            "sizes": torch.tensor([item.image.shape[1:] for item in items]),
            "labels": labels,
            "boxes": boxes,
            "image_ids": torch.from_numpy(self.split.image_ids[indices]),
            "original_sizes": torch.from_numpy(self.split.sizes[indices]),
        }
        return batch | (self._truth(indices) if items[0].is_evaluated else {})

    def _truth(self, indices: Sequence[int]) -> Batch:
        """Return these images' objects as annotated, the categories, and which images to show."""
        split = self.split
        rows = np.concatenate([np.r_[split.objects(index)] for index in indices])
        counts = split.objects_per_image[list(indices)]
        return {
            "truth_images": torch.from_numpy(np.repeat(split.image_ids[list(indices)], counts)),
            "truth_labels": torch.from_numpy(split.labels[rows]),
            "truth_boxes": torch.from_numpy(split.boxes[rows]),
            "truth_areas": torch.from_numpy(split.areas[rows]),
            "truth_crowds": torch.from_numpy(split.crowds[rows]),
            "categories": written(split.categories),
            "shown": torch.tensor([r for r, i in enumerate(indices) if i < _NUM_SHOWN]).long(),
        }

    def files(self, indices: Order) -> Sequence[str]:
        """Return the samples' files, one each, so a sync can fetch first what is read first."""
        return [f"{self.split.name}/{file}" for file in self.split.files[np.asarray(indices)]]


def written(categories: Sequence[Category]) -> Tensor:
    """Write categories to a tensor, which can be part of a batch."""
    return torch.frombuffer(bytearray(json.dumps(categories).encode()), dtype=torch.uint8)


def read(categories: Tensor) -> list[Category]:
    """Read categories from their tensor."""
    return [Category(*pair) for pair in json.loads(bytes(categories.cpu().tolist()))]
