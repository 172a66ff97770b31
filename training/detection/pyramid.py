"""The levels' maps as one row of tokens, with what is known of each token's place.

B images, L levels, S tokens over all levels, D width.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A level's box that a token proposes: this share of the image, twice as large from level to level.
_PROPOSED_SIZE = 0.05
_TEMPERATURE = 20.0


class Pyramid(NamedTuple):
    """Tokens of all levels, finest first. `is_padding` are those outside the image."""

    tokens_BSD: Tensor
    positions_BSD: Tensor  # sines
    is_padding_BS: Tensor
    centres_BS2: Tensor  # x, y relative to the valid image
    sizes_S: Tensor  # of the box that a token proposes
    valid_BL2: Tensor  # share of each level's width and height that is no padding
    shapes: tuple[tuple[int, int], ...]  # height, width of each level


def pyramid(maps: Sequence[Tensor], sizes_B2: Tensor, padded: tuple[int, int]) -> Pyramid:
    """The maps (B, D, h, w) of images with these valid sizes, padded to the size `padded`."""
    levels = [_level(number, x_BDhw, sizes_B2, padded) for number, x_BDhw in enumerate(maps)]
    tokens, positions, is_padding, centres, sizes, valid = zip(*levels, strict=True)
    return Pyramid(
        tokens_BSD=torch.cat(tokens, dim=1),
        positions_BSD=torch.cat(positions, dim=1),
        is_padding_BS=torch.cat(is_padding, dim=1),
        centres_BS2=torch.cat(centres, dim=1),
        sizes_S=torch.cat(sizes),
        valid_BL2=torch.stack(valid, dim=1),
        shapes=tuple((x_BDhw.shape[2], x_BDhw.shape[3]) for x_BDhw in maps),
    )


def sines(x_n: Tensor, num: int, temperature: float) -> Tensor:
    """For each x from 0 to 1, sine and cosine at num / 2 wavelengths: (..., n x num)."""
    pairs = torch.arange(num // 2, dtype=x_n.dtype, device=x_n.device)
    angles = x_n[..., None] * (2 * math.pi * temperature ** (-2 * pairs / num))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-3)


def _level(
    number: int, x_BDhw: Tensor, sizes_B2: Tensor, padded: tuple[int, int]
) -> tuple[Tensor, ...]:
    """One level's part of a pyramid; a cell is valid if its first pixel is."""
    width, shape = x_BDhw.shape[1], x_BDhw.shape[2:]
    numbers = [torch.arange(cells, device=x_BDhw.device) for cells in shape]
    is_valid = [
        numbers[axis] * padded[axis] // shape[axis] < sizes_B2[:, axis, None] for axis in (0, 1)
    ]
    # Rows, then columns: of how many cells, and the number of each.
    valid_2B1 = torch.stack([each.sum(dim=1, keepdim=True) for each in is_valid]).float()
    rows_Bh, columns_Bw = (
        (number_n + 0.5) / valid_B1 for number_n, valid_B1 in zip(numbers, valid_2B1, strict=True)
    )
    # The reference counts cells from 1 and so places a cell at its end; padding is at the last one.
    ends = [
        (number_n + 1).minimum(valid_B1) / valid_B1
        for number_n, valid_B1 in zip(numbers, valid_2B1, strict=True)
    ]
    sines_Bhn, sines_Bwn = (sines(each[..., None], width // 2, _TEMPERATURE) for each in ends)
    batch = (len(x_BDhw), *shape, -1)
    y_then_x = [sines_Bhn[:, :, None].expand(batch), sines_Bwn[:, None].expand(batch)]
    centre = [columns_Bw[:, None].expand(batch[:3]), rows_Bh[:, :, None].expand(batch[:3])]
    return (
        x_BDhw.flatten(2).transpose(1, 2),
        torch.cat(y_then_x, dim=-1).flatten(1, 2),
        ~(is_valid[0][:, :, None] & is_valid[1][:, None]).flatten(1),
        torch.stack(centre, dim=-1).flatten(1, 2),
        torch.full((shape.numel(),), _PROPOSED_SIZE * 2**number, device=x_BDhw.device),
        torch.cat([valid_2B1[1] / shape[1], valid_2B1[0] / shape[0]], dim=1),
    )
