"""Linear layers of many experts at once, in several ways; which is fastest depends on the GPU.

R rows, grouped by expert; E experts; I inputs, O outputs; C rows of the busiest expert.
Every way gives every expert a gradient, zeros if it has no row, so ranks always agree on which
parameters took part.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

# "split": a product per expert, after the host knows the counts. "bmm": one batched product for
# all, padded to the busiest. "grouped_mm": torch's own, fused from compute capability 9.0 on.
# "balanced": like "split", but every expert gets the same number of rows. Its results are wrong; it
# only measures the memory and work of a step without data (`measure`).
ExpertProducts: TypeAlias = Literal["split", "bmm", "grouped_mm", "balanced"]

# (x, weight_EOI, bias_EO) -> x by each expert's own layer.
Layer: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_expert(
    network: Callable[[Layer, Tensor], Tensor],
    x_RI: Tensor,
    is_mine_RE: Tensor,
    products: ExpertProducts,
) -> Tensor:
    """Apply `network`, which is called with a way to apply a layer and with the rows."""
    dtype = x_RI.dtype
    if torch.is_autocast_enabled(x_RI.device.type):
        dtype = torch.get_autocast_dtype(x_RI.device.type)
    x_RI = x_RI.to(dtype)
    if products == "grouped_mm":
        return network(_grouped(is_mine_RE), x_RI)
    if products == "bmm":
        places_R, num_places = _padded_places(is_mine_RE)
        num_experts = is_mine_RE.shape[1]
        x_ECI = _Spread.apply(x_RI, places_R, num_places).unflatten(0, (num_experts, -1))
        return cast(Tensor, _Gather.apply(network(_batched, x_ECI).flatten(0, 1), places_R))
    return network(_split(_sizes(is_mine_RE, products)), x_RI)


def _sizes(is_mine_RE: Tensor, products: ExpertProducts) -> list[int]:
    """Return the number of rows of each expert."""
    if products == "split":
        return cast(list[int], is_mine_RE.sum(dim=0).tolist())
    num_rows, num_experts = is_mine_RE.shape
    return [(num_rows + number) // num_experts for number in range(num_experts)]


def _grouped(is_mine_RE: Tensor) -> Layer:
    # In integers, because CUDA has no deterministic cumulative sum of floats.
    ends_E = is_mine_RE.sum(dim=0).cumsum(dim=0).to(torch.int32)

    def layer(x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        y_RO = cast(Tensor, _GroupedProduct.apply(x_RI, weight_EOI, ends_E))
        # A product, because the gradient of a gathered bias is a scatter: slow and with atomics.
        return torch.addmm(y_RO, is_mine_RE.to(x_RI.dtype), bias_EO.to(x_RI.dtype))

    return layer


class _GroupedProduct(torch.autograd.Function):
    """torch's grouped product; under autocast no copy of the weights is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, ends_E)
        return F.grouped_mm(x_RI, weight_EOI.to(x_RI.dtype).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RI, weight_EOI, ends_E = ctx.saved_tensors
        dy_RO = dy_RO.contiguous()
        dx_RI = F.grouped_mm(dy_RO, weight_EOI.to(dy_RO.dtype), offs=ends_E)
        dweight_EOI = F.grouped_mm(dy_RO.T, x_RI, offs=ends_E)
        return dx_RI, dweight_EOI.to(weight_EOI.dtype), None


def _batched(x_ECI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
    return cast(Tensor, _BatchedLinear.apply(x_ECI, weight_EOI, bias_EO))


class _BatchedLinear(torch.autograd.Function):
    """One product for all experts; under autocast no copy of the weights is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x_ECI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        ctx.save_for_backward(x_ECI, weight_EOI)
        weight_EIO = weight_EOI.to(x_ECI.dtype).transpose(1, 2)
        return torch.baddbmm(bias_EO.to(x_ECI.dtype)[:, None], x_ECI, weight_EIO)

    @staticmethod
    def backward(ctx: Any, dy_ECO: Tensor) -> tuple[Tensor, ...]:
        x_ECI, weight_EOI = ctx.saved_tensors
        dx_ECI = dy_ECO @ weight_EOI.to(dy_ECO.dtype)
        dweight_EOI = (dy_ECO.transpose(1, 2) @ x_ECI).to(weight_EOI.dtype)
        return dx_ECI, dweight_EOI, dy_ECO.sum(dim=1, dtype=weight_EOI.dtype)


def _padded_places(is_mine_RE: Tensor) -> tuple[Tensor, int]:
    """Return rows' places if every expert has as many as the busiest, and the number of places."""
    counts_E = is_mine_RE.sum(dim=0)
    num_rows, num_experts = is_mine_RE.shape
    capacity = max(1, int(counts_E.max()))
    shift_E = torch.arange(num_experts, device=counts_E.device) * capacity
    shift_E = shift_E - (counts_E.cumsum(dim=0) - counts_E)
    places_R = torch.arange(num_rows, device=counts_E.device) + (is_mine_RE * shift_E).sum(dim=1)
    return places_R, num_experts * capacity


class _Spread(torch.autograd.Function):
    """Spreads rows to their places among zeros; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, places_R: Tensor, num_places: int) -> Tensor:
        ctx.save_for_backward(places_R)
        return x_RI.new_zeros(num_places, x_RI.shape[1]).index_copy_(0, places_R, x_RI)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    """Gathers rows from their places; backward spreads, without a general index's atomics."""

    @staticmethod
    def forward(ctx: Any, x_PI: Tensor, places_R: Tensor) -> Tensor:
        ctx.save_for_backward(places_R)
        ctx.num_places = len(x_PI)
        return x_PI.index_select(0, places_R)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places_R,) = ctx.saved_tensors
        spread = gradient.new_zeros(ctx.num_places, gradient.shape[1])
        return spread.index_copy_(0, places_R, gradient), None


def _split(sizes: list[int]) -> Layer:
    def layer(x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        return cast(Tensor, _SplitLinear.apply(x_RI, weight_EOI, bias_EO, sizes))

    return layer


class _SplitLinear(torch.autograd.Function):
    """A product per expert, written in place, so no slice or gradient is copied."""

    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor, sizes: list[int]
    ) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI)
        ctx.sizes = sizes
        low_EOI, low_bias_EO = weight_EOI.to(x_RI.dtype), bias_EO.to(x_RI.dtype)
        y_RO = x_RI.new_empty(len(x_RI), weight_EOI.shape[1])
        parts = zip(torch.split(x_RI, sizes), torch.split(y_RO, sizes), strict=True)
        for number, (x, y) in enumerate(parts):
            torch.addmm(low_bias_EO[number], x, low_EOI[number].T, out=y)
        return y_RO

    @staticmethod
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EOI = ctx.saved_tensors
        dy_RO = dy_RO.contiguous()
        low_EOI = weight_EOI.to(dy_RO.dtype)
        dx_RI = torch.empty_like(x_RI)
        dweight_EOI = torch.empty_like(weight_EOI)
        dbias_EO = weight_EOI.new_empty(weight_EOI.shape[:2])
        parts = zip(*(torch.split(all_, ctx.sizes) for all_ in (x_RI, dx_RI, dy_RO)), strict=True)
        for number, (x, dx, dy) in enumerate(parts):
            torch.mm(dy, low_EOI[number], out=dx)
            if dweight_EOI.dtype == dy.dtype:
                torch.mm(dy.T, x, out=dweight_EOI[number])
            else:
                dweight_EOI[number] = dy.T @ x
            dbias_EO[number] = dy.sum(dim=0, dtype=dbias_EO.dtype)
        return dx_RI, dweight_EOI, dbias_EO, None
