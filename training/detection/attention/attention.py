"""One function for deformable attention, whichever implementation computes it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from training.detection.attention.choice import Implementation
from training.detection.attention.deterministic import by_rows
from training.detection.attention.reference import by_grid_sample

# (height, width) of each level, in the order of its tokens.
Shapes: TypeAlias = Sequence[tuple[int, int]]
_BY: Mapping[str, Callable[[Tensor, Shapes, Tensor, Tensor], Tensor]] = {
    "reference": by_grid_sample,
    "deterministic": by_rows,
}


def deformable_attention(
    value_BSMd: Tensor,
    shapes: Shapes,
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
    implementation: Implementation,
) -> Tensor:
    """Each query's weighted sum of what its points read: (B, Q, D), in the type of `value_BSMd`.

    Locations are (x, y) relative to the level, 0 to 1 from border to border, and should be in
    float32: bfloat16 is wrong by half a pixel. Whatever comes is computed in float32 at least.
    """
    dtype = torch.promote_types(value_BSMd.dtype, torch.float32)
    with torch.autocast(value_BSMd.device.type, enabled=False):
        out_BQD = _BY[implementation](
            value_BSMd.to(dtype), shapes, locations_BQMLP2.to(dtype), weights_BQMLP.to(dtype)
        )
    return out_BQD.to(value_BSMd.dtype)
