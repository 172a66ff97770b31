"""One function for deformable attention, whichever implementation computes it."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from training.workloads.detection.attention.deterministic import by_rows
from training.workloads.detection.attention.reference import by_compiled_grid_sample, by_grid_sample

Implementation: TypeAlias = Literal["triton", "compiled", "reference", "deterministic"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
# (height, width) of each level, in the order of its tokens.
Shapes: TypeAlias = Sequence[tuple[int, int]]
_Attend: TypeAlias = Callable[[Tensor, Shapes, Tensor, Tensor], Tensor]


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
    given = (value_BSMd, locations_BQMLP2, weights_BQMLP)
    if implementation != "triton":  # which reads lower precision as it is
        dtype = torch.promote_types(value_BSMd.dtype, torch.float32)
        given = (value_BSMd.to(dtype), locations_BQMLP2.to(dtype), weights_BQMLP.to(dtype))
    with torch.autocast(value_BSMd.device.type, enabled=False):
        out_BQD = _attend(implementation)(given[0], shapes, given[1], given[2])
    return out_BQD.to(value_BSMd.dtype)


def _attend(implementation: Implementation) -> _Attend:
    match implementation:
        case "triton":
            # Not every torch comes with Triton.
            from training.workloads.detection.attention.kernel import by_kernel

            return by_kernel
        case "compiled":
            return by_compiled_grid_sample
        case "reference":
            return by_grid_sample
        case "deterministic":
            return by_rows
