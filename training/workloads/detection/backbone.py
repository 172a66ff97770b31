"""The backbone: a ResNet of torchvision; its last three stages are levels of 8, 16 and 32 pixels.

torchvision is imported when one is built, and only then: it takes seconds. Its names are kept, so
that its weights fit.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from training.errors import UserError
from training.workloads.detection.architecture import GROUPS, Architecture


class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose statistics and scale are constants, computed in the input's own type.

    torchvision's computes in float32 under autocast, and so keeps activations of twice the size.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.zeros(channels))
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        scale_C = self.weight * (self.running_var + 1e-5).rsqrt()
        shift_C = self.bias - self.running_mean * scale_C
        scale_C11, shift_C11 = (each.to(x_BCHW.dtype)[:, None, None] for each in (scale_C, shift_C))
        return x_BCHW * scale_C11 + shift_C11


class Backbone(nn.Module):
    """Images to three maps."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        is_frozen = architecture.backbone_norm == "frozen_batch"
        net = _resnet(architecture.backbone, FrozenBatchNorm2d if is_frozen else _group_norm)
        self.conv1, self.bn1, self.relu, self.maxpool = net.conv1, net.bn1, net.relu, net.maxpool
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            *(net.layer1, net.layer2),
            *(net.layer3, net.layer4),
        )
        # The first linear layer's inputs are the last map's channels.
        self.channels: tuple[int, ...] = tuple(net.fc.in_features // by for by in (4, 2, 1))
        if is_frozen:
            for part in (self.conv1, self.layer1):
                part.requires_grad_(False)

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        x_BCHW = self.maxpool(self.relu(self.bn1(self.conv1(images_B3HW))))
        x_BCHW = self.layer1(x_BCHW)
        maps = []
        for stage in (self.layer2, self.layer3, self.layer4):
            x_BCHW = stage(x_BCHW)
            maps.append(x_BCHW)
        return maps


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels)


def _resnet(name: str, norm: object) -> Any:
    try:
        from torchvision.models import get_model
    except ModuleNotFoundError as error:
        raise UserError(
            f"the detector's backbone needs the package {error.name}, which {sys.executable} "
            "lacks; use an image that has it, or install the torchvision that matches torch "
            f"{torch.__version__.partition('+')[0]}"
        ) from error
    return get_model(name, weights=None, norm_layer=norm)
