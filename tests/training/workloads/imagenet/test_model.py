"""The networks: torchvision's own where they are its, and what the recipes change in them."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet50

from training.workloads.imagenet.model import Classifier, _BlurredConv


def images(count: int, side: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    return torch.randint(256, (count, side, side, 3), generator=rng, dtype=torch.uint8)


def test_resnet_50_is_torchvision_s_with_its_names_and_25_557_032_parameters() -> None:
    with torch.device("meta"):
        ours, theirs = Classifier("resnet50", 1000, blur_pool=False), resnet50()
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for model in (ours.network, theirs)
    ]
    assert shapes[0] == shapes[1]
    assert sum(p.numel() for p in ours.parameters()) == 25_557_032


@pytest.mark.parametrize("architecture", ["resnet8", "resnet18"])
def test_a_block_adds_nothing_before_it_is_trained(architecture: str) -> None:
    model = Classifier(architecture, 4, blur_pool=False)
    blocks = [m for m in model.modules() if type(m).__name__ == "BasicBlock"]
    assert blocks and all(not block.bn2.weight.any() for block in blocks)


def test_a_small_image_keeps_an_eighth_of_its_side() -> None:
    model = Classifier("resnet8", 4, blur_pool=False).eval()
    seen: list[torch.Tensor] = []
    model.network.stages.register_forward_hook(lambda *call: seen.append(call[2]))  # type: ignore[union-attr]
    assert model(images(2, 32)).shape == (2, 4)
    assert seen[0].shape == (2, 64, 4, 4)


def test_blur_comes_before_every_convolution_with_stride_but_the_first() -> None:
    with torch.device("meta"):
        model, plain = (Classifier("resnet50", 10, blur_pool=blur) for blur in (True, False))
    blurred = {name for name, module in model.named_modules() if isinstance(module, _BlurredConv)}
    with_stride = {
        name
        for name, module in plain.named_modules()
        if isinstance(module, nn.Conv2d) and max(module.stride) > 1
    }
    assert with_stride - blurred == {"network.conv1"}
    assert len(blurred) == 6
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())


def test_blur_keeps_an_even_area_and_halves_what_alternates() -> None:
    convolution = nn.Conv2d(16, 1, 1, bias=False)
    nn.init.constant_(convolution.weight, 1 / 16)
    blurred = _BlurredConv(convolution)
    even_BCHW = torch.ones(1, 16, 8, 8)
    inside = (0, 0, slice(1, -1), slice(1, -1))
    torch.testing.assert_close(blurred(even_BCHW)[inside], torch.ones(6, 6))
    stripes_BCHW = even_BCHW * torch.tensor([1.0, -1.0]).repeat(4)
    torch.testing.assert_close(blurred(stripes_BCHW)[inside], torch.zeros(6, 6))


@pytest.mark.parametrize("blur_pool", [False, True])
def test_everything_is_channels_last_from_the_pixels_to_the_last_block(blur_pool: bool) -> None:
    model = Classifier("resnet18", 4, blur_pool=blur_pool).eval()
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    last = torch.channels_last
    assert all(m.weight.is_contiguous(memory_format=last) for m in convolutions)
    given: list[bool] = []
    for convolution in convolutions:
        convolution.register_forward_pre_hook(
            lambda _, args: given.append(args[0].is_contiguous(memory_format=last))
        )
    model(images(2, 64))
    assert len(given) == len(convolutions) and all(given)
