"""ResNets: torchvision's, and a small one; with BlurPool as a choice, and blocks that start at 0.

Legend: B batch, C channels, H height, W width, K classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock, Bottleneck, conv1x1, conv3x3

# ImageNet's means and deviations, of pixels from 0 to 255.
MEAN = (123.675, 116.28, 103.53)
DEVIATION = (58.395, 57.12, 57.375)
_BLOCKS = {"resnet18": (BasicBlock, [2, 2, 2, 2]), "resnet50": (Bottleneck, [3, 4, 6, 3])}
_SMALL_CHANNELS = (16, 32, 64)


class Classifier(nn.Module):
    """uint8 pixels -> logits: normalizes on the device, in channels last."""

    def __init__(self, architecture: str, num_classes: int, *, blur_pool: bool) -> None:
        super().__init__()
        # The last norm of each block starts at 0: the block adds nothing at first.
        self.network: nn.Module
        if architecture == "resnet8":
            self.network = _SmallResNet(num_classes)
        else:
            self.network = ResNet(*_BLOCKS[architecture], num_classes, zero_init_residual=True)
        if blur_pool:
            _blur(self.network)
        _keep_channels_last(self.network)
        for name, values in (("mean", MEAN), ("deviation", DEVIATION)):
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Logits [B, K] of uint8 images."""
        mean_C, deviation_C = self.get_buffer("mean"), self.get_buffer("deviation")
        pixels_BHWC = (images_BHWC - mean_C) / deviation_C
        # In memory they are channels last already.
        logits_BK: Tensor = self.network(pixels_BHWC.permute(0, 3, 1, 2))
        return logits_BK


class _SmallResNet(nn.Module):
    """Eight layers for images of 32 to 96 pixels: a 3x3 stem, three stages of one block each.

    He et al. 2015, section 4.2, https://arxiv.org/abs/1512.03385; the stem has stride 2 here.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        width = _SMALL_CHANNELS[0]
        self.stem = nn.Sequential(conv3x3(3, width, 2), nn.BatchNorm2d(width), nn.ReLU())
        blocks = []
        for channels in _SMALL_CHANNELS:
            stride = 1 if channels == width else 2
            shortcut = None
            if stride > 1:
                projection = conv1x1(width, channels, stride)
                shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))
            blocks.append(BasicBlock(width, channels, stride, shortcut))
            width = channels
        self.stages = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits [B, K] of normalized pixels."""
        x_BCHW = self.stages(self.stem(x_BCHW))
        logits_BK: Tensor = self.fc(x_BCHW.mean(dim=(2, 3)))
        return logits_BK


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


def _keep_channels_last(network: nn.Module) -> None:
    """As `network.to(memory_format=...)`, which cannot be measured on fake tensors."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight.detach().contiguous(memory_format=torch.channels_last)
            module.weight = nn.Parameter(weight)


def _blur(module: nn.Module) -> None:
    """Blur before every convolution with stride that has at least 16 input channels, as FFCV's."""
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            if max(child.stride) > 1 and child.in_channels >= 16:
                setattr(module, name, BlurredConv(child))
        else:
            _blur(child)
