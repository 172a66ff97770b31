"""Deformable attention with its projections: where it looks first, and what a box means to it."""

import torch

from tests.training.workloads.detection.detectors import SMALL
from training.workloads.detection.config import Architecture
from training.workloads.detection.decoder import MultiScaleAttention, Pyramid, pyramid


def _read(padded: int = 64) -> Pyramid:
    strides = (8, 16, 32, 64)
    maps = [torch.randn(2, SMALL.width, padded // s, padded // s) for s in strides]
    return pyramid(maps, torch.tensor([[64, 64], [40, 64]]), (padded, padded))


def test_heads_look_into_eight_directions_and_points_further_and_further() -> None:
    attention = MultiScaleAttention(Architecture(num_classes=1))
    attention.initialize()
    offsets = attention.sampling_offsets.bias.view(8, 4, 4, 2).detach()
    directions = [[1, 0], [1, 1], [0, 1], [-1, 1], [-1, 0], [-1, -1], [0, -1], [1, -1]]
    expected = torch.tensor(directions).float()
    for level in range(4):
        for point in range(4):
            torch.testing.assert_close(offsets[:, level, point], (point + 1) * expected)
    assert not attention.sampling_offsets.weight.any()
    assert not attention.attention_weights.weight.any()


def test_a_points_offsets_are_pixels_of_each_level_and_a_boxs_are_shares_of_it() -> None:
    torch.manual_seed(0)
    read, attention = _read(), MultiScaleAttention(SMALL)
    attention.initialize()
    points = torch.rand(2, 5, 1, 2).expand(-1, -1, 4, -1)
    query = torch.zeros(2, 5, SMALL.width)
    of_points = attention(query, points, read)
    # A box whose half, divided among two points, is a pixel of each level.
    sides = torch.tensor([2 * 2.0 / width for _, width in read.shapes])[:, None].expand(-1, 2)
    boxes = torch.cat([points, sides.expand(2, 5, -1, -1)], dim=-1)
    torch.testing.assert_close(attention(query, boxes, read), of_points)


def test_what_is_padding_is_read_as_zero() -> None:
    torch.manual_seed(0)
    read, attention = _read(), MultiScaleAttention(SMALL)
    attention.initialize()
    points, query = torch.rand(2, 5, 4, 2), torch.randn(2, 5, SMALL.width)
    expected = attention(query, points, read)
    other = torch.where(read.is_padding_BS[..., None], 7.0, read.tokens_BSD)
    assert read.is_padding_BS.any()
    assert torch.equal(attention(query, points, read._replace(tokens_BSD=other)), expected)
