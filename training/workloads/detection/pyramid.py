"""The levels' maps as one row of tokens, with what is known of each token's place.

B images, L levels, S tokens over all levels, D width.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from training.workloads.detection.constants import constant

# A token of the first level proposes a box of this share of the image, of the next one twice that.
_PROPOSED_SIZE = 0.05
_TEMPERATURE = 20.0


class Pyramid(NamedTuple):
    """Tokens of all levels, finest first. `is_padding` are those outside the image."""

    tokens_BSD: Tensor
    positions_BSD: Tensor  # sines
    is_padding_BS: Tensor
    centres_BS2: Tensor  # x, y relative to the valid image
    sizes_S: Tensor  # of the box that a token proposes
    valid_BL2: Tensor  # share of each level's width and height that is not padding
    cells_L2: Tensor  # width and height of each level
    shapes: tuple[tuple[int, int], ...]  # height and width of each level


def pyramid(maps: Sequence[Tensor], sizes_B2: Tensor, padded: tuple[int, int]) -> Pyramid:
    """The maps (B, D, h, w) of images with these valid sizes, padded to the size `padded`."""
    shapes = tuple((x_BDhw.shape[2], x_BDhw.shape[3]) for x_BDhw in maps)
    device = sizes_B2.device
    rows, columns = (
        [_axis(shape[axis], padded[axis], sizes_B2[:, axis, None]) for shape in shapes]
        for axis in (0, 1)
    )
    levels = list(zip(rows, columns, strict=True))
    return Pyramid(
        tokens_BSD=_tokens(x_BDhw.movedim(1, -1) for x_BDhw in maps),
        positions_BSD=_tokens(_sines(y, x, maps[0].shape[1]) for y, x in levels),
        is_padding_BS=_tokens(
            ~(y.is_valid_Bn[:, :, None] & x.is_valid_Bn[:, None]) for y, x in levels
        ),
        centres_BS2=_tokens(_grid(y.centre_Bn, x.centre_Bn).flip(-1) for y, x in levels),
        sizes_S=torch.cat(
            [
                torch.full((height * width,), _PROPOSED_SIZE * 2**number, device=device)
                for number, (height, width) in enumerate(shapes)
            ]
        ),
        valid_BL2=torch.stack(
            [torch.cat([x.share_B1, y.share_B1], dim=1) for y, x in levels], dim=1
        ),
        cells_L2=constant(shapes, device).flip(-1),
        shapes=shapes,
    )


def sines(x_n: Tensor, num: int, temperature: float) -> Tensor:
    """For each x from 0 to 1, sine and cosine at num / 2 wavelengths: (..., n x num)."""
    pairs = torch.arange(num // 2, dtype=x_n.dtype, device=x_n.device)
    angles = x_n[..., None] * (2 * math.pi * temperature ** (-2 * pairs / num))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-3)


class _Axis(NamedTuple):
    """The cells along one side of a level."""

    is_valid_Bn: Tensor
    centre_Bn: Tensor  # relative to the valid cells
    end_Bn: Tensor
    share_B1: Tensor  # of the cells that are valid


def _axis(num_cells: int, padded: int, size_B1: Tensor) -> _Axis:
    """A cell is valid if its first pixel is, as torch's nearest neighbour samples masks."""
    number_n = torch.arange(num_cells, device=size_B1.device)
    is_valid_Bn = number_n * padded // num_cells < size_B1
    num_valid_B1 = is_valid_Bn.sum(dim=1, keepdim=True)
    return _Axis(
        is_valid_Bn=is_valid_Bn,
        centre_Bn=(number_n + 0.5) / num_valid_B1,
        end_Bn=((number_n + 1) / num_valid_B1).clamp(max=1),
        share_B1=num_valid_B1 / num_cells,
    )


def _sines(y: _Axis, x: _Axis, width: int) -> Tensor:
    """Half of the width for y, half for x. The reference takes a cell's end for its position."""
    sines_Bhn, sines_Bwn = (
        sines(axis.end_Bn[..., None], width // 2, _TEMPERATURE) for axis in (y, x)
    )
    shape = (len(sines_Bhn), sines_Bhn.shape[1], sines_Bwn.shape[1], -1)
    return torch.cat(
        [sines_Bhn[:, :, None].expand(shape), sines_Bwn[:, None].expand(shape)], dim=-1
    )


def _grid(y_Bh: Tensor, x_Bw: Tensor) -> Tensor:
    """Every pair of y and x, (B, h, w, 2)."""
    shape = (len(y_Bh), y_Bh.shape[1], x_Bw.shape[1])
    return torch.stack([y_Bh[:, :, None].expand(shape), x_Bw[:, None].expand(shape)], dim=-1)


def _tokens(levels: Iterable[Tensor]) -> Tensor:
    """Of levels (B, h, w, ...) one row (B, S, ...)."""
    return torch.cat([level.flatten(1, 2) for level in levels], dim=1)
