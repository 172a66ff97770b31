"""What is measured: the detector's size and the images', from a test's to the reference's."""

from collections.abc import Mapping
from dataclasses import dataclass

from training.workloads.detection.architecture import Architecture

# Walls and rooms, and as many objects as a floor plan of the laptop's has on average.
NUM_CLASSES, NUM_OBJECTS = 2, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A batch of images, all of one size, and the detector that sees it."""

    images: int
    height: int
    width: int
    architecture: Architecture

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(height, width) of each level, at strides of 8, 16, 32 and 64 pixels."""
        strides = (8, 16, 32, 64)[: self.architecture.num_levels]
        return [(-(-self.height // each), -(-self.width // each)) for each in strides]


_LAPTOP = Architecture(
    num_classes=NUM_CLASSES,
    backbone="resnet18",
    width=128,
    encoder_layers=2,
    decoder_layers=2,
    feed_forward=256,
    num_queries=60,
    denoising_queries=30,
)
_TINY = Architecture(
    num_classes=NUM_CLASSES,
    backbone="resnet18",
    width=32,
    num_heads=2,
    encoder_layers=1,
    decoder_layers=1,
    feed_forward=32,
    num_queries=5,
    denoising_queries=9,
)
_REFERENCE = Architecture(num_classes=NUM_CLASSES, num_queries=900)

SCALES: Mapping[str, Scale] = {
    "tiny": Scale(images=1, height=64, width=96, architecture=_TINY),
    "laptop": Scale(images=4, height=160, width=160, architecture=_LAPTOP),
    "half": Scale(images=1, height=400, width=667, architecture=_REFERENCE),
    "reference": Scale(images=1, height=800, width=1333, architecture=_REFERENCE),
    "reference_pair": Scale(images=2, height=800, width=1333, architecture=_REFERENCE),
}
