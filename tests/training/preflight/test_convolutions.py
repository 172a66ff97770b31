"""Convolutions are counted by hand-made figures: forward, backward, groups, layout."""

import pytest
import torch
from torch import nn

from training.preflight.footprint import Convolutions

BATCH, SIDE, BEFORE, AFTER = 2, 8, 4, 6
FORWARD = 2 * BATCH * AFTER * SIDE * SIDE * BEFORE * 3 * 3


def count(layer: nn.Module, images: torch.Tensor) -> Convolutions:
    with Convolutions() as found:
        layer(images).sum().backward()
    return found


def images(channels: int = BEFORE) -> torch.Tensor:
    return torch.zeros(BATCH, channels, SIDE, SIDE)


def test_forward_and_the_gradient_of_the_weight_cost_the_same() -> None:
    found = count(nn.Conv2d(BEFORE, AFTER, 3, padding=1), images())
    assert (found.flops, found.grouped_flops) == (2 * FORWARD, 0)


def test_the_gradient_of_the_input_is_a_third_pass() -> None:
    found = count(nn.Conv2d(BEFORE, AFTER, 3, padding=1), images().requires_grad_())
    assert found.flops == 3 * FORWARD


def test_groups_are_counted_and_depthwise_ones_are_not() -> None:
    grouped = count(nn.Conv2d(BEFORE, AFTER, 3, padding=1, groups=2), images())
    assert grouped.flops == grouped.grouped_flops == FORWARD
    depthwise = count(nn.Conv2d(BEFORE, BEFORE, 3, padding=1, groups=BEFORE), images())
    assert depthwise.grouped_flops == 0


def test_a_transposed_convolution_computes_for_each_pixel_that_it_is_given() -> None:
    found = count(nn.ConvTranspose2d(BEFORE, AFTER, 2, stride=2), images())
    assert found.flops == 2 * (2 * BATCH * BEFORE * SIDE * SIDE * AFTER * 2 * 2)


@pytest.mark.parametrize(("channels_last", "share"), [(True, 1.0), (False, 0.0)])
def test_the_layout_is_that_of_the_input(channels_last: bool, share: float) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    found = count(nn.Conv2d(BEFORE, AFTER, 3), images().contiguous(memory_format=layout))
    assert found.shares(10 * found.flops) == {
        "convolution_share": 0.1,
        "grouped_share": 0.0,
        "channels_last_share": share,
    }


def test_a_step_without_convolutions_has_shares_of_zero() -> None:
    found = count(nn.Linear(SIDE, 1), images())
    assert set(found.shares(1000).values()) == {0.0}
