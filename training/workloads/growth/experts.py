"""Experts: each token goes to `top_k` of them, none is dropped, and their weights sum to one.

The fastest way to compute them on a machine is measured, not looked up: torch's fused grouped
product needs compute capability 9.0 (below, it is a loop that waits for the host), and the cost of
padding depends on the distribution of tokens.
N tokens, D width, E experts, K experts of a token, R = N x K rows, grouped by expert.
"""

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.workloads.growth.config import Activation, ExpertBlock, ModelConfig
from training.workloads.growth.expert_products import ExpertProducts, Layer, by_expert

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

    # Otherwise, every new number of an expert's tokens would be compiled separately.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
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
