"""Experts: each token goes to `top_k` of them, none is dropped, and their weights sum to one.

The fastest way to compute them on a machine is measured, not looked up: torch's fused grouped
product needs compute capability 9.0 (below, it is a loop that waits for the host), and the cost of
padding depends on the distribution of tokens.
N tokens, D width, E experts, K experts of a token, R = N x K rows, grouped by expert.

Linear layers of many experts at once, in several ways; which is fastest depends on the GPU.

R rows, grouped by expert; E experts; I inputs, O outputs; C rows of the busiest expert.
Every way gives every expert a gradient, zeros if it has no row, so ranks always agree on which
parameters took part.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from training.workloads.growth.config import Activation, ExpertBlock, ModelConfig

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


_ROUNDS = 5
# "balanced" only measures: its results are wrong.
_CANDIDATES: tuple[ExpertProducts, ...] = ("split", "bmm", "grouped_mm")


class ExpertFeedForward(nn.Module):
    """A router and its experts: (N, D) to (N, D), and how evenly it distributed the tokens.

    Forward and backward only gather, without atomics, so their bits are always the same.
    """

    def __init__(self, width: int, block: ExpertBlock, activation: Activation) -> None:
        super().__init__()
        self.top_k = block.top_k
        self.products: ExpertProducts = "split"
        self.router = nn.Linear(width, block.num_experts)
        self.experts = _Experts(width, block.hidden, block.num_experts, activation)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        return _uncompiled(self, x_ND) if torch.compiler.is_compiling() else self.compute(x_ND)

    def compute(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return what forward does."""
        # In full precision, because rounding would otherwise decide near ties.
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = self.router(x_ND.to(self.router.weight.dtype))
        chosen_logits_NK, chosen_NK = logits_NE.topk(self.top_k, dim=-1)
        # The softmax over the chosen is that over all, renormalized.
        weights_NK = chosen_logits_NK.softmax(dim=-1)
        sorted_R, order_R = chosen_NK.flatten().sort(stable=True)
        is_mine_RE = sorted_R[:, None] == torch.arange(logits_NE.shape[1], device=x_ND.device)
        rows_RD = _Dispatch.apply(x_ND, order_R, self.top_k)
        rows_RD = by_expert(self.experts, rows_RD, is_mine_RE, self.products)
        y_ND = _Combine.apply(rows_RD, weights_NK, order_R)
        return y_ND, _shares(logits_NE, is_mine_RE.sum(dim=0))


# Otherwise, every new number of an expert's tokens would be compiled separately. The decorator is
# torch's own: torch.compiler.disable imports the compiler at once, also where nothing is compiled.
@_disable_dynamo
def _uncompiled(ffn: ExpertFeedForward, x_ND: Tensor) -> tuple[Tensor, Tensor]:
    return ffn.compute(x_ND)


class _Experts(nn.Module):
    """The experts' weights, each kind in one tensor: (E, outputs, inputs), (E, outputs)."""

    up_weight: nn.Parameter
    up_bias: nn.Parameter
    gate_weight: nn.Parameter
    gate_bias: nn.Parameter
    down_weight: nn.Parameter
    down_bias: nn.Parameter

    def __init__(self, width: int, hidden: int, num_experts: int, activation: Activation) -> None:
        super().__init__()
        self.is_gated = activation == "swiglu"
        for name in ("up", "gate", "down") if self.is_gated else ("up", "down"):
            shape = (width, hidden) if name == "down" else (hidden, width)
            weight, bias = torch.empty(num_experts, *shape), torch.empty(num_experts, shape[0])
            self.register_parameter(f"{name}_weight", nn.Parameter(weight))
            self.register_parameter(f"{name}_bias", nn.Parameter(bias))

    def forward(self, layer: Layer, x: Tensor) -> Tensor:
        """Compute each expert's output of its rows; `layer` applies each expert's own layer."""
        up = layer(x, self.up_weight, self.up_bias)
        if self.is_gated:
            inner = F.silu(layer(x, self.gate_weight, self.gate_bias)) * up
        else:
            inner = F.gelu(up)
        return layer(inner, self.down_weight, self.down_bias)


class _Dispatch(torch.autograd.Function):
    """Copies each token for each of its experts; backward sums the gradients."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.top_k = top_k
        return x_ND.index_select(0, order_R // top_k)

    @staticmethod
    def backward(ctx: Any, drows_RD: Tensor) -> tuple[Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        places_KN = _places(order_R, ctx.top_k)
        dx_ND = drows_RD.index_select(0, places_KN[0])
        for places_N in places_KN[1:]:
            dx_ND += drows_RD.index_select(0, places_N)
        return dx_ND, None, None


class _Combine(torch.autograd.Function):
    """Sums each token's results from its experts by weight, in the weights' precision."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_NK: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_NK, order_R)
        y_ND = weights_NK.new_zeros(len(weights_NK), rows_RD.shape[1])
        for place, places_N in enumerate(_places(order_R, weights_NK.shape[1])):
            y_ND.addcmul_(rows_RD.index_select(0, places_N), weights_NK[:, place, None])
        return y_ND

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RD, weights_NK, order_R = ctx.saved_tensors
        top_k = weights_NK.shape[1]
        drows_RD = dy_ND.index_select(0, order_R // top_k)
        drows_RD *= weights_NK.flatten()[order_R, None]
        dweights_NK = torch.stack(
            [
                (rows_RD.index_select(0, places_N) * dy_ND).sum(dim=1)
                for places_N in _places(order_R, top_k)
            ],
            dim=1,
        )
        return drows_RD.to(rows_RD.dtype), dweights_NK, None


def _places(order_R: Tensor, top_k: int) -> Tensor:
    """Return the row of each token for its first, second ... expert: (K, N)."""
    inverse_R = torch.empty_like(order_R)
    inverse_R.scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    return inverse_R.view(-1, top_k).T


def _shares(logits_NE: Tensor, counts_E: Tensor) -> Tensor:
    """Return the load-balance loss (Switch Transformer, arXiv:2101.03961) and the busiest's share.

    Both are 1 if every expert gets the same number of tokens.
    """
    num_experts = logits_NE.shape[1]
    load_E = num_experts * counts_E / counts_E.sum()
    balance = (load_E * logits_NE.softmax(dim=-1).mean(dim=0)).sum()
    return torch.stack([balance, load_E.amax().to(balance.dtype)])


def choose_products(
    config: ModelConfig,
    *,
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    started_with: str | None = None,
) -> ExpertProducts:
    """Choose the fastest way for micro-batches of `num_tokens` tokens, computed in `dtype`.

    `started_with` is kept if this machine supports it, because other ways round differently.
    """
    block = max(
        (block for block in config.blocks if isinstance(block, ExpertBlock)),
        key=lambda block: block.hidden,
        default=None,
    )
    if block is None:
        return "split"
    bench = _Bench(config, block, num_tokens, device, dtype)
    if started_with in _CANDIDATES and bench.can(started_with):
        return started_with
    # "split" works everywhere; if it does not, its error says why.
    bench.step("split")
    able = [products for products in _CANDIDATES if bench.can(products)]
    seconds: dict[ExpertProducts, list[float]] = {products: [] for products in able}
    for _ in range(_ROUNDS):  # in turns, so a busy moment slows all of them
        for products in able:
            seconds[products].append(bench.seconds(products))
    return min(able, key=lambda products: statistics.median(seconds[products]))


class _Bench:
    """One block's experts, with tokens routed as by an untrained router."""

    def __init__(
        self,
        config: ModelConfig,
        block: ExpertBlock,
        num_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._dtype = dtype
        rng = torch.Generator(device).manual_seed(0)
        with device:
            self._ffn = ExpertFeedForward(config.width, block, config.activation)
            shape = (num_tokens, config.width)
            self._x_ND = torch.randn(shape, generator=rng, requires_grad=True)
        if dtype == torch.float64:
            self._ffn.double()
            self._x_ND = self._x_ND.detach().double().requires_grad_()
        with torch.no_grad():
            for parameter in self._ffn.parameters():
                parameter.normal_(std=0.02, generator=rng)

    def step(self, products: ExpertProducts) -> tuple[Tensor, ...]:
        """Run forward and backward; return the gradients."""
        self._ffn.products = products
        is_low = self._dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(self._x_ND.device.type, dtype=self._dtype, enabled=is_low):
            y_ND, _ = self._ffn(self._x_ND)
        parameters = list(self._ffn.experts.parameters())
        return torch.autograd.grad(y_ND, [self._x_ND, *parameters], torch.ones_like(y_ND))

    def can(self, products: ExpertProducts) -> bool:
        """Return whether it works here; this also takes the first step, which is slower."""
        try:
            self.step(products)
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def seconds(self, products: ExpertProducts) -> float:
        """Return the seconds of one step, until the device has completed it."""
        self._synchronize()
        began = time.perf_counter()
        self.step(products)
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._x_ND.device.type == "cuda":
            torch.cuda.synchronize(self._x_ND.device)
