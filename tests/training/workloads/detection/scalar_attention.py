"""Deformable attention as its paper and its CUDA kernel define it, one number at a time."""

import math
from collections.abc import Sequence

from torch import Tensor


def scalar_attention(
    value_BSMd: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
) -> Tensor:
    """Loops over everything; pixels are counted as the kernel does: h = y H - 0.5 in (-1, H)."""
    B, _, M, d = value_BSMd.shape
    _, Q, _, L, P, _ = locations_BQMLP2.shape
    out = value_BSMd.new_zeros(B, Q, M, d)
    starts = [sum(h * w for h, w in shapes[:level]) for level in range(L)]
    for b in range(B):
        for q in range(Q):
            for m in range(M):
                for level, (height, width) in enumerate(shapes):
                    tokens = value_BSMd[b, starts[level] : starts[level] + height * width, m]
                    for p in range(P):
                        x, y = locations_BQMLP2[b, q, m, level, p].tolist()
                        read = bilinear(tokens.view(height, width, d), x, y)
                        out[b, q, m] += weights_BQMLP[b, q, m, level, p] * read
    return out.view(B, Q, M * d)


def bilinear(pixels: Tensor, x: float, y: float) -> Tensor:
    """What is read at (x, y), relative to the level, of its (height, width, d) pixels."""
    height, width, d = pixels.shape
    h, w = y * height - 0.5, x * width - 0.5
    read = pixels.new_zeros(d)
    if not (-1 < h < height and -1 < w < width):
        return read
    low_h, low_w = math.floor(h), math.floor(w)
    for row, share_h in ((low_h, 1 - (h - low_h)), (low_h + 1, h - low_h)):
        for column, share_w in ((low_w, 1 - (w - low_w)), (low_w + 1, w - low_w)):
            if 0 <= row < height and 0 <= column < width:
                read = read + share_h * share_w * pixels[row, column]
    return read
