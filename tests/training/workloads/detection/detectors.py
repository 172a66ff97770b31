"""Small detectors and batches for the tests."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from training.workloads.detection.config import Architecture
from training.workloads.detection.detector import Detector

SMALL = Architecture(
    num_classes=3,
    backbone="resnet18",
    weights="random",
    width=32,
    num_heads=4,
    num_points=2,
    encoder_layers=2,
    decoder_layers=3,
    feed_forward=48,
    num_queries=12,
    denoising_queries=10,
)


class Images(NamedTuple):
    """A batch as the data loader makes it."""

    images: Tensor
    sizes: Tensor
    labels: Tensor
    boxes: Tensor


def small_detector(*, seed: int = 0, **changes: object) -> Detector:
    """In double precision, with weights large enough that all matter."""
    torch.manual_seed(seed)
    detector = Detector(replace(SMALL, **changes)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            if not name.startswith("backbone."):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return detector


def images(*num_objects: int, height: int = 64, width: int = 96, seed: int = 1) -> Images:
    """Images of noise with so many objects each; every second one is padded."""
    rng = torch.Generator().manual_seed(seed)
    num, most = len(num_objects), max(num_objects)
    pixels = torch.randint(256, (num, 3, height, width), generator=rng, dtype=torch.uint8)
    sizes = torch.tensor([[height, width], [height - 20, width - 10]] * num)[:num]
    labels = torch.randint(SMALL.num_classes, (num, most), generator=rng)
    labels[torch.arange(most) >= torch.tensor(num_objects)[:, None]] = -1
    boxes = 0.3 + 0.4 * torch.rand((num, most, 4), generator=rng, dtype=torch.float64)
    boxes[labels < 0] = 0
    return Images(pixels, sizes, labels, boxes)
