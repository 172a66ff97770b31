"""Which implementation of deformable attention a machine computes with.

On a GPU the Triton kernel where it works and bits may differ, else sums of rows. On a CPU, where
bits are equal with all, what is faster. "compiled" is never chosen, only asked for.
"""

import logging
import subprocess
from typing import cast

import torch
from torch import Tensor

from training.workloads.detection.attention.attention import Implementation, deformable_attention

_log = logging.getLogger(__name__)
_SHAPES = ((5, 7), (3, 2))
# Images with a longer side have enough points for sums of rows to pay on a CPU: benchmarks/LOG.md.
_SMALL_SIDE = 200


def choose(
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
    started_with: str | None = None,
    max_side: int | None = None,
) -> Implementation:
    """The best that works here for values of `dtype`; what the stage started with is kept.

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


_GRADIENTS = tuple(f"the gradient of {name}" for name in ("value", "locations", "weights"))


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
