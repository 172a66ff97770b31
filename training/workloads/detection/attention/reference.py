"""Deformable attention in plain PyTorch, on any device: torch's own bilinear sampling."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


def by_grid_sample(
    value_BSMd: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
) -> Tensor:
    """A level at a time: the points of one level take memory, never those of all."""
    num_images, _, num_heads, width = value_BSMd.shape
    # grid_sample counts from -1 to 1, border to border.
    grid_LNQP2 = (2 * locations_BQMLP2 - 1).permute(3, 0, 2, 1, 4, 5).flatten(1, 2)
    weights_LNQP = weights_BQMLP.permute(3, 0, 2, 1, 4).flatten(1, 2)
    levels = torch.split(value_BSMd, [height * width for height, width in shapes], dim=1)
    out_NdQ: Tensor | None = None
    for value_BsMd, shape, grid_NQP2, weights_NQP in zip(
        levels, shapes, grid_LNQP2, weights_LNQP, strict=True
    ):
        value_Ndhw = value_BsMd.permute(0, 2, 3, 1).reshape(-1, width, *shape)
        points_NdQP = F.grid_sample(value_Ndhw, grid_NQP2, align_corners=False)
        read_NdQ = (points_NdQP * weights_NQP[:, None]).sum(dim=-1)
        out_NdQ = read_NdQ if out_NdQ is None else out_NdQ + read_NdQ
    assert out_NdQ is not None
    return out_NdQ.reshape(num_images, num_heads * width, -1).transpose(1, 2)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(by_grid_sample)


def by_compiled_grid_sample(
    value_BSMd: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
) -> Tensor:
    """The same through torch.compile, which compiles anew for images of another size."""
    return _compiled()(value_BSMd, shapes, locations_BQMLP2, weights_BQMLP)
