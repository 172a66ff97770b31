"""Multi-scale deformable attention (arXiv:2010.04159): a query reads a few points of each level.

B images, S tokens of all levels, Q queries, M heads, L levels, P points, d width of a head, D Md.
A point's value is bilinear between its four pixels; outside its level everything is zero.
"""

import logging
import subprocess
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from training.workloads.detection.attention_rows import by_rows

_log = logging.getLogger(__name__)

Implementation: TypeAlias = Literal["triton", "reference", "deterministic"]
_IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
# (height, width) of each level, in the order of its tokens.
_Shapes: TypeAlias = Sequence[tuple[int, int]]
_Attend: TypeAlias = Callable[[Tensor, _Shapes, Tensor, Tensor], Tensor]
# Images with a longer side have enough points for sums of rows to pay on a CPU: benchmarks/LOG.md.
_SMALL_SIDE = 200
# The small case that Triton's kernel is tried on.
_SHAPES = ((5, 7), (3, 2))
_GRADIENTS = tuple(f"the gradient of {name}" for name in ("value", "locations", "weights"))


def deformable_attention(
    value_BSMd: Tensor,
    shapes: _Shapes,
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
            from training.workloads.detection.attention_kernel import by_kernel

            return by_kernel
        case "reference":
            return _by_grid_sample
        case "deterministic":
            return by_rows


def _by_grid_sample(
    value_BSMd: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
) -> Tensor:
    """By torch's own bilinear sampling, a level at a time: the points of one level take memory."""
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


def choose(
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
    started_with: str | None = None,
    max_side: int | None = None,
) -> Implementation:
    """The best that works here for values of `dtype`; what the stage started with is kept.

    On a GPU the Triton kernel where it works and bits may differ, else sums of rows. On a CPU,
    where all give the same bits, what is faster.

    `max_side` is the longest side of an image, in pixels, if it is known.
    """
    if device.type != "cuda":
        if started_with is not None and started_with != "triton":
            return cast(Implementation, started_with)
        is_small = max_side is not None and max_side <= _SMALL_SIDE
        return "reference" if is_small else "deterministic"
    if deterministic or started_with == "deterministic":
        return "deterministic"
    if reason := why_not_triton(device, dtype):
        _log.warning(
            "[attention] Triton's kernel does not work here (%s); deformable attention is computed "
            "as sums of rows instead: the same results, but slower",
            reason,
        )
        return "deterministic"
    return "triton"


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Run the kernel on a small case; what is wrong with it, if anything."""
    try:
        from triton.errors import TritonError
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    try:
        found, expected = (_step(which, device, dtype) for which in ("triton", "deterministic"))
    except (
        TritonError,
        RuntimeError,
        AssertionError,
        OSError,
        subprocess.SubprocessError,
    ) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    for name, mine, right in zip(("the output", *_GRADIENTS), found, expected, strict=True):
        error_share = float((mine - right).abs().max() / right.abs().max())
        # bfloat16 rounds what is right to 0.4 %.
        if not error_share < 0.02:
            return f"{name} is wrong by {error_share:.1%}"
    return None


def _step(
    implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The output of a small case and its three gradients, in float32 on the CPU."""
    rng, num_tokens = torch.Generator().manual_seed(0), sum(h * w for h, w in _SHAPES)
    given = [
        torch.randn(2, num_tokens, 2, 24, generator=rng).to(device, dtype),
        (1.5 * torch.rand(2, 9, 2, 2, 3, 2, generator=rng) - 0.25).to(device),
        torch.rand(2, 9, 2, 2, 3, generator=rng).to(device),
    ]
    inputs = [each.requires_grad_() for each in given]
    with torch.enable_grad():
        out_BQD = deformable_attention(inputs[0], _SHAPES, inputs[1], inputs[2], implementation)
    gradients = torch.autograd.grad(out_BQD, inputs, torch.ones_like(out_BQD))
    return tuple(each.detach().float().cpu() for each in (out_BQD, *gradients))
