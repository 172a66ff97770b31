"""Classifiers: torchvision's, timm's, and a small ResNet; optionally with BlurPool.

Tensors keep their library's names, so its weights can be read and written.
Legend: B batch, C channels, H height, W width, K classes.
"""

import difflib
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models
from torchvision.models.resnet import BasicBlock, conv1x1, conv3x3

from contract.errors import UserError

_log = logging.getLogger(__name__)

# ImageNet's means and standard deviations, for pixels from 0 to 255.
MEAN = (123.675, 116.28, 103.53)
DEVIATION = (58.395, 57.12, 57.375)
SMALL, TIMM = "resnet8", "timm/"
_LISTS = (nn.Sequential, nn.ModuleList)
_SMALL_CHANNELS = (16, 32, 64)
_OURS = "network."
_COUNTERS = "num_batches_tracked"


class Classifier(nn.Module):
    """Maps uint8 pixels to logits; normalizes on the device, in channels last."""

    def __init__(self, architecture: str, num_classes: int, *, blur_pool: bool) -> None:
        super().__init__()
        self.network = _network(architecture, num_classes)
        if blur_pool:
            _blur(self.network)
        _keep_channels_last(self.network)
        for name, values in zip(("mean", "deviation"), pixels_of(architecture), strict=True):
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Return logits [B, K] of uint8 images."""
        mean_C, deviation_C = self.get_buffer("mean"), self.get_buffer("deviation")
        pixels_BHWC = (images_BHWC - mean_C) / deviation_C
        # In memory, they are already channels last.
        logits_BK: Tensor = self.network(pixels_BHWC.permute(0, 3, 1, 2))
        return logits_BK


def pixels_of(architecture: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the channels' mean and deviation, 0 to 255, that its library's weights expect."""
    if not architecture.startswith(TIMM):
        return MEAN, DEVIATION
    import timm

    about = timm.get_pretrained_cfg(architecture.removeprefix(TIMM))
    if about is None:
        return MEAN, DEVIATION
    mean, deviation = (tuple(round(255 * each, 3) for each in of) for of in (about.mean, about.std))
    return mean, deviation


def layers(network: nn.Module) -> Iterator[nn.Module]:
    """Yield consecutive layers: the children, and each part of children that are lists."""
    for child in network.children():
        parts = list(child.children())
        # For example, the encoder of torchvision's transformers.
        holds_list = not isinstance(child, _LISTS) and any(isinstance(p, _LISTS) for p in parts)
        for part in parts if holds_list else [child]:
            yield from part.children() if isinstance(part, _LISTS) else [part]


def is_resnet(architecture: str) -> bool:
    """Return whether it is one of torchvision's ResNets, whose tensors have timm's names."""
    return architecture != SMALL and architecture.startswith(("resnet", "resnext", "wide_resnet"))


def _network(architecture: str, num_classes: int) -> nn.Module:
    """Make the model of that name; ResNet blocks' last norms start at 0, so they add nothing."""
    if architecture == SMALL:
        return _SmallResNet(num_classes)
    library, build = "torchvision", models.get_model
    known, name = models.list_models(module=models), architecture.removeprefix(TIMM)
    if architecture.startswith(TIMM):
        try:
            import timm
        except ModuleNotFoundError:
            raise UserError(
                f"architecture {architecture!r} needs timm; install it, and name it in the "
                "requirements"
            ) from None
        library, build, known = "timm", timm.create_model, timm.list_models()
    if name.partition(".")[0] not in known:
        like = difflib.get_close_matches(name, [SMALL, *known])
        raise UserError(
            f"architecture is {architecture!r}, which {library} does not have; "
            + (f"did you mean {', '.join(like)}?" if like else "use the name of one of its models")
        )
    options = {"zero_init_residual": True} if is_resnet(architecture) else {}
    if library == "torchvision" and name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}
    network: nn.Module = build(name, num_classes=num_classes, **options)
    return network


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
        """Return logits [B, K] of normalized pixels."""
        x_BCHW = self.stages(self.stem(x_BCHW))
        logits_BK: Tensor = self.fc(x_BCHW.mean(dim=(2, 3)))
        return logits_BK


class _BlurredConv(nn.Module):
    """A strided convolution after a blur (Zhang 2019, https://arxiv.org/abs/1904.11486)."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        kernel = (row[:, None] * row).expand(convolution.in_channels, 1, 3, 3).clone()
        self.register_buffer("kernel", kernel, persistent=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the convolution of the blurred input."""
        kernel = self.get_buffer("kernel").to(x_BCHW.dtype)
        blurred_BCHW = F.conv2d(x_BCHW, kernel, padding=1, groups=x_BCHW.shape[1])
        out: Tensor = self.convolution(blurred_BCHW)
        return out


def _keep_channels_last(network: nn.Module) -> None:
    """Do what `network.to(memory_format=...)` does, which fake tensors cannot measure."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight.detach().contiguous(memory_format=torch.channels_last)
            module.weight = nn.Parameter(weight)


def _blur(module: nn.Module) -> None:
    """Blur before each strided convolution of at least 16 input channels, as FFCV does."""
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            if max(child.stride) > 1 and child.in_channels >= 16:
                setattr(module, name, _BlurredConv(child))
        else:
            _blur(child)


def from_library(m: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Make `m`'s state from a library's; with other classes, log that the head stays new."""
    own = m.state_dict()
    found = {_OURS + name: tensor for name, tensor in tensors.items()}
    # These count batches, on which no layer here depends; some files omit them.
    counters = {name: t for name, t in own.items() if name.endswith(_COUNTERS)}
    if not own.keys() - counters.keys() <= found.keys():
        return None
    # The tensors of the last layer: its weight and bias.
    last = own[[name for name, t in own.items() if t.ndim > 1][-1]].shape
    head = [n for n in own if own[n].shape != found.get(n, own[n]).shape]
    if head and all(own[n].shape[:1] == last[:1] for n in head):
        theirs, ours = found[head[0]].shape[0], last[0]
        _log.info("[weights] %d classes there and %d here: the last layer is new", theirs, ours)
        found |= {name: own[name] for name in head}
    return {**counters, **found}


def write_for_library(m: nn.Module, out: Path) -> None:
    """Write a safetensors file that torchvision's or timm's model of this name loads strictly."""
    state = {name.removeprefix(_OURS): tensor for name, tensor in m.state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, out)


def write_program(m: nn.Module, out: Path, side: int = 64) -> None:
    """Write a torch.export program for uint8 images (batch, side, side, 3).

    Other sizes it takes as far as its trace at `side` pixels allows; transformers take no others.
    """
    from torch.export import Dim, export, save

    images = torch.zeros(2, side, side, 3, dtype=torch.uint8)
    sizes = {0: Dim("batch"), 1: Dim.AUTO, 2: Dim.AUTO}
    program = export(m.eval(), (images,), dynamic_shapes=(sizes,))
    with warnings.catch_warnings():
        # A warning about weights that share memory; all are on the CPU.
        warnings.simplefilter("ignore", UserWarning)
        save(program, out)
