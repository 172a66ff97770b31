"""Deformable attention as a sum of rows of a table: the same bits every time, also on a GPU.

The table has a row for each token and head, and each point reads four of them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def by_rows(
    value_BSMd: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
) -> Tensor:
    """An embedding bag, whose backward sorts the rows it adds to: no atomics, no copies of rows."""
    num_images, num_tokens, num_heads, _ = value_BSMd.shape
    tokens_BQMLP4, shares_BQMLP4 = _corners(shapes, locations_BQMLP2)
    device = value_BSMd.device
    image_B111 = torch.arange(num_images, device=device).view(-1, 1, 1, 1, 1, 1) * num_tokens
    head_M111 = torch.arange(num_heads, device=device).view(-1, 1, 1, 1)
    rows_BQMLP4 = (tokens_BQMLP4 + image_B111) * num_heads + head_M111
    shares_BQMLP4 = shares_BQMLP4 * weights_BQMLP[..., None]
    out_Nd = F.embedding_bag(
        rows_BQMLP4.flatten(0, 2).flatten(1),
        value_BSMd.flatten(0, 2),
        mode="sum",
        per_sample_weights=shares_BQMLP4.flatten(0, 2).flatten(1),
    )
    return out_Nd.view(num_images, -1, num_heads * value_BSMd.shape[3])


def _corners(shapes: Sequence[tuple[int, int]], locations_BQMLP2: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of the four pixels around each point, and their shares; zero outside the level."""
    device, dtype = locations_BQMLP2.device, locations_BQMLP2.dtype
    size_L12 = torch.tensor([[(width, height)] for height, width in shapes], device=device)
    start_L1 = size_L12.prod(dim=-1).cumsum(dim=0) - size_L12.prod(dim=-1)
    at_BQMLP2 = locations_BQMLP2 * size_L12.to(dtype) - 0.5
    low_BQMLP2 = at_BQMLP2.detach().floor()
    high_share_BQMLP2 = at_BQMLP2 - low_BQMLP2
    tokens, shares = [], []
    for corner in ((0, 0), (1, 0), (0, 1), (1, 1)):
        high_2 = torch.tensor(corner, device=device)
        pixel_BQMLP2 = low_BQMLP2 + high_2
        is_inside_BQMLP = ((pixel_BQMLP2 >= 0) & (pixel_BQMLP2 < size_L12)).all(dim=-1)
        share_BQMLP2 = torch.where(high_2 == 1, high_share_BQMLP2, 1 - high_share_BQMLP2)
        # Clamped before it is an integer: a point may be anywhere.
        pixel_BQMLP2 = pixel_BQMLP2.clamp(min=0).minimum(size_L12 - 1).to(torch.int64)
        tokens.append(start_L1 + pixel_BQMLP2[..., 1] * size_L12[..., 0] + pixel_BQMLP2[..., 0])
        shares.append(torch.where(is_inside_BQMLP, share_BQMLP2.prod(dim=-1), 0))
    return torch.stack(tokens, dim=-1), torch.stack(shares, dim=-1)
