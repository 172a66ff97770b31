"""The project's detector as DINO-4scale is published, and as document 003 configures it.

It includes the document's changes for when memory runs out. Unless stated otherwise, a batch is the
two images that take the most memory: a wide and a tall one, both padded to a square.
python -m sizing model benchmarks.anchors.detector:dino --batch 2 --precision float32 --samples 2935
"""

from typing import Any

import torch
from torch import Tensor, nn

from training.workloads.detection.config import Architecture
from training.workloads.detection.detector import Detector, denoising
from training.workloads.detection.losses import criterion, in_order

_HEIGHT, _WIDTH, _OBJECTS = 800, 1333, 20


def dino(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """Use 900 queries and COCO's 91 classes, with images of COCO's usual shape."""
    return _detector(samples, num_classes=91, num_queries=900, height=_HEIGHT)


def dino_padded(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """Use the same model with the batch that takes the most memory."""
    return _detector(samples, num_classes=91, num_queries=900)


def queries_300(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """Use the document's own setting."""
    return _detector(samples)


def queries_200(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """Use fewer queries."""
    return _detector(samples, num_queries=200)


def width_192(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """Use a narrower model."""
    return _detector(samples, width=192)


def _detector(
    samples: int,
    *,
    num_classes: int = 2,
    num_queries: int = 300,
    width: int = 256,
    height: int = _WIDTH,
) -> tuple[nn.Module, Tensor, Any]:
    architecture = Architecture(num_classes=num_classes, num_queries=num_queries, width=width)
    # This way it keeps for backward what the GPU kernel keeps: its inputs.
    model = Detector(architecture, "deterministic")
    return model, torch.zeros(samples, 3, height, _WIDTH, dtype=torch.uint8), _loss


def _loss(model: Detector, images: Tensor) -> Tensor:
    """Return the detector's own loss, matching in order, as real matches depend on the data."""
    labels = torch.zeros(len(images), _OBJECTS, dtype=torch.long)
    boxes = torch.full((len(images), _OBJECTS, 4), 0.5)
    sizes = torch.tensor(images.shape[-2:]).expand(len(images), 2)
    found = model(images, sizes, denoising(labels, boxes, model.architecture))
    return criterion(found, labels, boxes, match=in_order).total
