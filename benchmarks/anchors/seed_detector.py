"""The project's detector as document 003 sets it up, and with what it does when memory runs out.

Two images that take the most memory: a wide and a tall one, both padded to a square.
"""

from typing import Any

import torch
from torch import Tensor, nn

from training.workloads.detection.config import Architecture
from training.workloads.detection.detector import Detector, denoising
from training.workloads.detection.losses import criterion, in_order

_SIDE, _OBJECTS = 1333, 20


def queries_300(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """The document's own setting."""
    return _detector(samples)


def queries_200(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """Fewer queries."""
    return _detector(samples, num_queries=200)


def width_192(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """A narrower model."""
    return _detector(samples, width=192)


def _detector(
    samples: int, *, num_queries: int = 300, width: int = 256
) -> tuple[nn.Module, Tensor, Any]:
    architecture = Architecture(num_classes=2, num_queries=num_queries, width=width)
    # It keeps what the kernel of a GPU keeps: its inputs.
    model = Detector(architecture, "deterministic")
    return model, torch.zeros(samples, 3, _SIDE, _SIDE, dtype=torch.uint8), _loss


def _loss(model: Detector, images: Tensor) -> Tensor:
    """The detector's own, with predictions matched in order, as data decide which is matched."""
    labels = torch.zeros(len(images), _OBJECTS, dtype=torch.long)
    boxes = torch.full((len(images), _OBJECTS, 4), 0.5)
    sizes = torch.full((len(images), 2), _SIDE)
    found = model(images, sizes, denoising(labels, boxes, model.architecture))
    return criterion(found, labels, boxes, match=in_order).total
