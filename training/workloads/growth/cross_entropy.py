"""The sum of cross-entropies of a vocabulary's logits that are never all in memory.

A chunk of tokens at a time, forward computes the gradients too: backward only scales them, so no
logits are kept or computed twice. N tokens, D width, V vocabulary, C a chunk's tokens.
"""

from typing import Any, cast

import torch
from torch import Tensor

# 1024 rows of GPT-2's vocabulary are 206 MB in float32, and enough to keep a GPU busy.
_CHUNK_TOKENS = 1024


def sum_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, chunk_tokens: int = _CHUNK_TOKENS
) -> Tensor:
    """F.cross_entropy(F.linear(x, weight), targets, reduction="sum"), also under autocast."""
    dtype = x_ND.dtype
    if torch.is_autocast_enabled(x_ND.device.type):
        dtype = torch.get_autocast_dtype(x_ND.device.type)
    total = _SumCrossEntropy.apply(
        x_ND, weight_VD, targets_N, dtype, chunk_tokens, torch.is_grad_enabled()
    )
    return cast(Tensor, total)


class _SumCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        dtype: torch.dtype,
        chunk_tokens: int,
        is_training: bool,
    ) -> Tensor:
        with torch.autocast(x_ND.device.type, enabled=False):
            total, *gradients = _summed(
                x_ND, weight_VD, targets_N, dtype, chunk_tokens, is_training
            )
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        dx_ND, dweight_VD = ctx.saved_tensors
        # In place: a copy of the weight's gradient could be what no longer fits into memory. A
        # second backward through the same loss is refused by autograd.
        return dx_ND.mul_(scale), dweight_VD.mul_(scale), None, None, None, None


def _summed(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    dtype: torch.dtype,
    chunk_tokens: int,
    is_training: bool,
) -> tuple[Tensor, ...]:
    """The sum, and if asked for, its gradients by `x_ND` and by `weight_VD`."""
    low_VD = weight_VD.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = x_ND.new_zeros((), dtype=wide)
    dx_ND = torch.empty_like(x_ND)
    dweight_VD = torch.zeros_like(weight_VD)
    for start in range(0, len(x_ND), chunk_tokens):
        stop = start + chunk_tokens
        x_CD, targets_C1 = x_ND[start:stop].to(dtype), targets_N[start:stop, None]
        logs_CV = torch.log_softmax(x_CD @ low_VD.T, dim=-1, dtype=wide)
        total -= logs_CV.gather(1, targets_C1).sum()
        if is_training:
            dlogits_CV = logs_CV.exp_()
            at_target_C1 = dlogits_CV.gather(1, targets_C1) - 1.0
            dlogits_CV = dlogits_CV.scatter_(1, targets_C1, at_target_C1).to(dtype)
            dx_ND[start:stop] = dlogits_CV @ low_VD
            if dtype == weight_VD.dtype:
                torch.addmm(dweight_VD, dlogits_CV.T, x_CD, out=dweight_VD)
            else:
                dweight_VD += dlogits_CV.T @ x_CD
    return (total, dx_ND, dweight_VD) if is_training else (total,)
