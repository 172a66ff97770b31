"""Deformable attention as one Triton kernel forward and one backward; only the inputs are saved.

A program holds N bags (a query's head) and their d values in registers, and sums in float32 (or
float64). Backward adds to the gradient of `value` with atomics, in any order. In deterministic
recipes it adds integers, multiples of a power of two, whose sum is the same in any order.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_Shapes: TypeAlias = tuple[tuple[int, int], ...]
_VALUES = 1024  # per program: N bags of d values, d rounded up to a power of two


def by_kernel(
    value_BSMd: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
) -> Tensor:
    """Attend to values of any, also mixed, floating types; bits repeat if a recipe demands it."""
    given = [each.contiguous() for each in (value_BSMd, locations_BQMLP2, weights_BQMLP)]
    if max(each.numel() for each in given) >= 2**31:
        raise ValueError("the kernel of deformable attention uses 32-bit offsets; use fewer images")
    return cast(Tensor, _Attention.apply(*given, tuple(shapes)))


@lru_cache(maxsize=1024)
def _levels(shapes: _Shapes, device: torch.device) -> Tensor:
    """Return (height, width, first token) of each level, on the kernel's device."""
    rows, start = [], 0
    for height, width in shapes:
        rows.append((height, width, start))
        start += height * width
    return torch.tensor(rows, device=device, dtype=torch.int32)


def _arguments(value: Tensor, locations: Tensor) -> dict[str, Any]:
    """Return the sizes that both kernels need."""
    _, num_tokens, num_heads, width = value.shape
    num_images, num_queries, _, num_levels, num_points, _ = locations.shape
    columns = triton.next_power_of_2(width)
    return {
        "num_bags": num_images * num_queries * num_heads,
        "num_queries": num_queries,
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "width": width,  # d
        "num_levels": num_levels,
        "num_points": num_points,
        "BAGS": max(1, _VALUES // columns),
        "COLUMNS": columns,
        "TYPE": tl.float64 if value.dtype == torch.float64 else tl.float32,
        "enable_fp_fusion": True,  # a newer Triton's default would change a run's bits
    }


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, locations: Tensor, weights: Tensor, shapes: _Shapes
    ) -> Tensor:
        ctx.save_for_backward(value, locations, weights)
        ctx.shapes = shapes
        given = _arguments(value, locations)
        out_BQD = value.new_empty(*locations.shape[:2], value.shape[2] * value.shape[3])
        with torch.cuda.device_of(value):  # type: ignore[no-untyped-call]
            _forward[_programs(given)](
                value, _levels(shapes, value.device), locations, weights, out_BQD, **given
            )
        return out_BQD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BQD: Tensor) -> tuple[Tensor | None, ...]:
        value, locations, weights = ctx.saved_tensors
        given = _arguments(value, locations)
        dtype = torch.promote_types(value.dtype, torch.float32)
        is_exact = torch.are_deterministic_algorithms_enabled()
        dvalue = torch.zeros_like(value, dtype=torch.int64 if is_exact else dtype)
        dlocations, dweights = torch.empty_like(locations), torch.empty_like(weights)
        units = _units(dout_BQD, weights, dtype) if is_exact else dweights  # not read
        with torch.cuda.device_of(value):  # type: ignore[no-untyped-call]
            _backward[_programs(given)](
                *(value, _levels(ctx.shapes, value.device), locations, weights),
                *(dout_BQD.contiguous(), units, dvalue, dlocations, dweights),
                **given,
                EXACT=is_exact,
            )
        if is_exact:
            dvalue = dvalue.to(dtype).div_(units)
        return dvalue.to(value.dtype), dlocations, dweights, None


def _units(dout_BQD: Tensor, weights_BQMLP: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the integer units of 1.0: as many as possible without a pixel's sum overflowing.

    A query reads a pixel at most once with each point of one level. The host reads no number here;
    a value that is not finite makes the entire gradient NaN.
    """
    most = dout_BQD.shape[1] * weights_BQMLP.shape[-1]
    # No term is larger, because a share is at most 1.
    bound = dout_BQD.abs().amax().to(dtype) * weights_BQMLP.abs().amax()
    exponent = 62 - math.ceil(math.log2(most)) - torch.frexp(bound).exponent
    largest = math.frexp(torch.finfo(dtype).max)[1] - 1
    units = torch.ones_like(bound).ldexp(exponent.clamp(max=largest))
    return units.where(bound.isfinite(), torch.nan)


def _programs(given: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(given["num_bags"], given["BAGS"]),)


# These change with the size of the images, so the code must not be specialized for their values.
_CHANGING = ["num_bags", "num_queries", "num_tokens"]


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    value,
    levels,
    locations,
    weights,
    out,
    num_bags,
    num_queries,
    num_tokens,
    num_heads: tl.constexpr,
    width: tl.constexpr,
    num_levels: tl.constexpr,
    num_points: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
):
    bag_N = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    column_d = tl.arange(0, COLUMNS)
    is_bag_N, is_column_d = bag_N < num_bags, column_d < width
    row_N = bag_N // (num_queries * num_heads) * num_tokens * num_heads + bag_N % num_heads
    out_Nd = tl.zeros((BAGS, COLUMNS), TYPE)
    for level in range(num_levels):
        height, across, start = _level(levels, level)
        for number in range(num_points):
            point_N = (bag_N * num_levels + level) * num_points + number
            left_N, top_N, x_N, y_N, weight_N, is_inside_N = _point(
                locations, weights, point_N, is_bag_N, height, across, TYPE
            )
            for corner in tl.static_range(4):
                down, right = corner // 2, corner % 2
                share_N = _share(y_N, down) * _share(x_N, right) * weight_N
                at_Nd, has_Nd = _values(
                    *(row_N + start * num_heads, top_N + down, left_N + right, height, across),
                    *(num_heads, width, is_inside_N, column_d, is_column_d),
                )
                out_Nd += share_N[:, None] * tl.load(value + at_Nd, has_Nd, other=0.0).to(TYPE)
    at_Nd = bag_N[:, None] * width + column_d[None, :]
    tl.store(out + at_Nd, out_Nd, mask=is_bag_N[:, None] & is_column_d[None, :])


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    value,
    levels,
    locations,
    weights,
    dout,
    units,
    dvalue,
    dlocations,
    dweights,
    num_bags,
    num_queries,
    num_tokens,
    num_heads: tl.constexpr,
    width: tl.constexpr,
    num_levels: tl.constexpr,
    num_points: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
    EXACT: tl.constexpr,
):
    bag_N = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    column_d = tl.arange(0, COLUMNS)
    is_bag_N, is_column_d = bag_N < num_bags, column_d < width
    row_N = bag_N // (num_queries * num_heads) * num_tokens * num_heads + bag_N % num_heads
    at_Nd = bag_N[:, None] * width + column_d[None, :]
    has_Nd = is_bag_N[:, None] & is_column_d[None, :]
    dout_Nd = tl.load(dout + at_Nd, has_Nd, other=0.0).to(TYPE)
    for level in range(num_levels):
        height, across, start = _level(levels, level)
        for number in range(num_points):
            point_N = (bag_N * num_levels + level) * num_points + number
            left_N, top_N, x_N, y_N, weight_N, is_inside_N = _point(
                locations, weights, point_N, is_bag_N, height, across, TYPE
            )
            dweight_N = tl.zeros((BAGS,), TYPE)
            dx_N, dy_N = tl.zeros((BAGS,), TYPE), tl.zeros((BAGS,), TYPE)
            for corner in tl.static_range(4):
                down, right = corner // 2, corner % 2
                share_y_N, share_x_N = _share(y_N, down), _share(x_N, right)
                at_Nd, has_Nd = _values(
                    *(row_N + start * num_heads, top_N + down, left_N + right, height, across),
                    *(num_heads, width, is_inside_N, column_d, is_column_d),
                )
                read_Nd = tl.load(value + at_Nd, has_Nd, other=0.0).to(TYPE)
                dshare_N = tl.sum(read_Nd * dout_Nd, axis=1)
                dweight_N += dshare_N * share_y_N * share_x_N
                dx_N += dshare_N * share_y_N * (2 * right - 1)
                dy_N += dshare_N * share_x_N * (2 * down - 1)
                term_Nd = (share_y_N * share_x_N * weight_N)[:, None] * dout_Nd
                if EXACT:
                    term_Nd = tl.floor(term_Nd * tl.load(units) + 0.5).to(tl.int64)
                tl.atomic_add(dvalue + at_Nd, term_Nd, mask=has_Nd, sem="relaxed")
            tl.store(dweights + point_N, dweight_N, mask=is_bag_N)
            tl.store(dlocations + 2 * point_N, dx_N * weight_N * across, mask=is_bag_N)
            tl.store(dlocations + 2 * point_N + 1, dy_N * weight_N * height, mask=is_bag_N)


@triton.jit
def _level(levels, level):  # type: ignore[no-untyped-def]
    """Return height, width and first token."""
    at = levels + 3 * level
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit  # type: ignore[untyped-decorator]
def _point(  # type: ignore[no-untyped-def]
    locations, weights, point_N, is_bag_N, height, across, TYPE: tl.constexpr
):
    """Return a point's upper left pixel, its offset from there, its weight and if it is inside."""
    x_N = tl.load(locations + 2 * point_N, is_bag_N, other=0.0).to(TYPE) * across - 0.5
    y_N = tl.load(locations + 2 * point_N + 1, is_bag_N, other=0.0).to(TYPE) * height - 0.5
    weight_N = tl.load(weights + point_N, is_bag_N, other=0.0).to(TYPE)
    # Also False for NaN, which must not be converted to an integer.
    is_inside_N = is_bag_N & (x_N > -1) & (y_N > -1) & (x_N < across) & (y_N < height)
    x_N, y_N = tl.where(is_inside_N, x_N, 0.0), tl.where(is_inside_N, y_N, 0.0)
    left_N, top_N = tl.floor(x_N), tl.floor(y_N)
    x_N, y_N = x_N - left_N, y_N - top_N
    return left_N.to(tl.int32), top_N.to(tl.int32), x_N, y_N, weight_N, is_inside_N


@triton.jit  # type: ignore[untyped-decorator]
def _share(way_N, far: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the near or far pixel's share of a point that lies between the two."""
    return way_N if far else 1 - way_N


@triton.jit
def _values(  # type: ignore[no-untyped-def]
    first_N, y_N, x_N, height, across, num_heads, width, is_inside_N, column_d, is_column_d
):
    """Return the addresses of a pixel's d values, and whether the level has that pixel."""
    has_N = is_inside_N & (y_N >= 0) & (y_N < height) & (x_N >= 0) & (x_N < across)
    at_N = (first_N + (y_N * across + x_N) * num_heads) * width
    return at_N[:, None] + column_d[None, :], has_N[:, None] & is_column_d[None, :]
