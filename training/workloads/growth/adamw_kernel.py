"""A step of AdamW with moments in bfloat16 as one Triton kernel, which moves each number once.

It computes in float32, as torch's own does, and rounds the moments to nearest.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def step_by_kernel(
    values: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, *numbers: float
) -> None:
    """Step contiguous tensors of one size; `step`, on the same device, counts earlier steps.

    `numbers` are the learning rate, both betas, epsilon and the weight decay.
    """
    lr, beta1, beta2, eps, weight_decay = numbers
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        _adamw[(triton.cdiv(values.numel(), _BLOCK),)](
            *(values, gradient, mean, square, step, values.numel()),
            *(lr, 1.0 - lr * weight_decay, eps),
            *(beta1, beta2, math.log2(beta1), math.log2(beta2)),
            BLOCK=_BLOCK,
            enable_fp_fusion=True,  # a newer Triton's default would change a run's bits
        )


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    values,
    gradient,
    mean,
    square,
    step,
    num,
    lr,
    kept,  # share of each value after its decay
    eps,
    beta1,
    beta2,
    log_beta1,
    log_beta2,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
    count = tl.load(step) + 1.0
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    # Bias corrections, because the moments started from zero.
    m_share = 1.0 - tl.exp2(count * log_beta1)
    v_share = 1.0 - tl.exp2(count * log_beta2)
    x = tl.load(values + at, mask=inside, other=0.0) * kept
    x -= lr / m_share * m / (tl.sqrt(v) / tl.sqrt(v_share) + eps)
    tl.store(values + at, x, mask=inside)
    tl.store(mean + at, m.to(tl.bfloat16), mask=inside)
    tl.store(square + at, v.to(tl.bfloat16), mask=inside)
