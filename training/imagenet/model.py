"""ResNets of torchvision, with the choices that recipes make: BlurPool, zero-initialized blocks.

Legend: B batch, C channels, H height, W width, K classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock, Bottleneck

# ImageNet's means and deviations, of pixels from 0 to 255.
MEAN = (123.675, 116.28, 103.53)
DEVIATION = (58.395, 57.12, 57.375)
_BLOCKS = {
    "resnet10": (BasicBlock, [1, 1, 1, 1]),
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
}


class Classifier(nn.Module):
    """uint8 pixels -> logits: normalizes on the device, in channels last."""

    def __init__(self, architecture: str, num_classes: int, *, blur_pool: bool) -> None:
        super().__init__()
        block, layers = _BLOCKS[architecture]
        # The last norm of each block starts at 0: the block adds nothing at first.
        self.network = ResNet(block, layers, num_classes, zero_init_residual=True)
        if blur_pool:
            _blur(self.network)
        self.network.to(memory_format=torch.channels_last)
        for name, values in (("mean", MEAN), ("deviation", DEVIATION)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1), persistent=False)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Logits [B, K] of uint8 images."""
        mean, deviation = self.get_buffer("mean"), self.get_buffer("deviation")
        # Channels last as they are: nothing is copied here.
        pixels_BCHW = (images_BHWC.permute(0, 3, 1, 2).float() - mean) / deviation
        logits: Tensor = self.network(pixels_BCHW.contiguous(memory_format=torch.channels_last))
        return logits


class BlurredConv(nn.Module):
    """Blurs before a convolution with stride (Zhang 2019, https://arxiv.org/abs/1904.11486)."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        kernel = (row[:, None] * row).expand(convolution.in_channels, 1, 3, 3).clone()
        self.register_buffer("kernel", kernel, persistent=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """The convolution of the blurred input."""
        kernel = self.get_buffer("kernel").to(x_BCHW.dtype)
        blurred_BCHW = F.conv2d(x_BCHW, kernel, padding=1, groups=x_BCHW.shape[1])
        out: Tensor = self.convolution(blurred_BCHW)
        return out


def _blur(module: nn.Module) -> None:
    """Blur before every convolution with stride that has at least 16 input channels, as FFCV's."""
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            if max(child.stride) > 1 and child.in_channels >= 16:
                setattr(module, name, BlurredConv(child))
        else:
            _blur(child)
