"""Detection models of the ground truths: what forward and backward on the CPU hold at their peak.

Proposals depend on data, so fake tensors cannot run them: this takes 10 GB of memory and minutes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from training.preflight.counting import LiveMemory

# Two images as COCO training pads them (800 x 1333), with COCO's seven objects each.
_HEIGHT, _WIDTH, _OBJECTS = 800, 1333, 7


def detectors() -> Mapping[str, Callable[[], nn.Module]]:
    """Return how to build each detector of sizing/evidence/ground_truths.csv, by name."""
    return {
        "faster_rcnn_r50_fpn": partial(_build, "FasterRCNN", "resnet50"),
        "mask_rcnn_r50_fpn": partial(_build, "MaskRCNN", "resnet50"),
        "keypoint_rcnn_r50_fpn": partial(_build, "KeypointRCNN", "resnet50"),
        # mmdet keeps batch norm in eval mode, which keeps its input; frozen constants do not.
        "mmdet_faster_rcnn_r50_fpn": partial(_build, "FasterRCNN", "resnet50", frozen=False),
        "mmdet_faster_rcnn_r101_fpn": partial(_build, "FasterRCNN", "resnet101", frozen=False),
        "mmdet_faster_rcnn_x101_64x4d_fpn": partial(
            _build, "FasterRCNN", "resnext101_64x4d", frozen=False
        ),
        "faster_rcnn_r101_fpn": partial(_build, "FasterRCNN", "resnet101"),
        "faster_rcnn_x101_32x8d_fpn": partial(_build, "FasterRCNN", "resnext101_32x8d"),
    }


def _build(head: str, backbone: str, *, frozen: bool = True) -> nn.Module:
    """Build as the references train: stem and first block frozen, batch norm statistics too."""
    import torchvision
    from torchvision.models import detection
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
    from torchvision.ops.misc import FrozenBatchNorm2d

    heads = {
        "FasterRCNN": (detection.FasterRCNN, 91),
        "MaskRCNN": (detection.MaskRCNN, 91),
        "KeypointRCNN": (detection.KeypointRCNN, 2),
    }
    norm = FrozenBatchNorm2d if frozen else nn.BatchNorm2d
    body = torchvision.models.get_model(backbone, weights=None, norm_layer=norm)
    make, num_classes = heads[head]
    # Any overlap counts: an untrained model then has as many positive regions as a trained one.
    model = make(
        _resnet_fpn_extractor(body, 3),
        num_classes=num_classes,
        box_fg_iou_thresh=0.01,
        box_bg_iou_thresh=0.01,
    )
    assert isinstance(model, nn.Module)
    return model


def footprint(model: nn.Module) -> dict[str, Any]:
    """Return the bytes of one image, from forward and backward of two."""
    torch.manual_seed(0)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    memory = LiveMemory()
    memory.phase = "forward"
    with memory:
        images = [torch.rand(3, _HEIGHT, _WIDTH) for _ in range(2)]
        losses = model(images, [_target() for _ in images])
        sum(losses.values()).backward()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": trainable,
        "float32": {"peak_bytes_per_sample": memory.peak_bytes // 2, "peak_bytes_fixed": 0},
    }


def _target() -> dict[str, Any]:
    corner = torch.rand(_OBJECTS, 2) * torch.tensor([_WIDTH * 0.7, _HEIGHT * 0.7])
    boxes = torch.cat([corner, corner + 20 + torch.rand(_OBJECTS, 2) * 200], dim=1)
    masks = torch.zeros(_OBJECTS, _HEIGHT, _WIDTH, dtype=torch.uint8)
    masks[:, 200:400, 200:400] = 1
    points = torch.cat([corner[:, None].expand(-1, 17, -1) + 5, torch.ones(_OBJECTS, 17, 1)], -1)
    labels = torch.ones(_OBJECTS, dtype=torch.long)
    return {"boxes": boxes, "labels": labels, "masks": masks, "keypoints": points}
