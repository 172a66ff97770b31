"""Experts: each token goes to `top_k` of them, none is dropped, their weights sum to one.

N tokens, D width, E experts, K experts of a token, R = N x K rows, those of an expert together.
"""

from typing import Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.growth.architecture import Activation, ExpertBlock
from training.growth.feed_forward import linear

ExpertProducts: TypeAlias = Literal["split", "bmm", "grouped_mm", "balanced"]


class ExpertFeedForward(nn.Module):
    """A router and its experts: (N, D) to (N, D), and how evenly it shared out the tokens."""

    def __init__(self, width: int, block: ExpertBlock, activation: Activation) -> None:
        super().__init__()
        self.top_k = block.top_k
        self.products: ExpertProducts = "split"
        self.router = linear(width, block.num_experts)
        self.experts = Experts(width, block.hidden, block.num_experts, activation)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        # In full precision: near ties would otherwise be decided by rounding.
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = self.router(x_ND.to(self.router.weight.dtype))
        chosen_logits_NK, chosen_NK = logits_NE.topk(self.top_k, dim=-1)
        # The softmax over the chosen is that over all, renormalised.
        weights_NK = chosen_logits_NK.softmax(dim=-1)
        is_mine_RE = chosen_NK.flatten()[:, None] == torch.arange(
            logits_NE.shape[1], device=x_ND.device
        )
        counts_E = is_mine_RE.sum(dim=0)
        y_ND = torch.zeros_like(x_ND)
        for number in range(logits_NE.shape[1]):
            tokens, place = (chosen_NK == number).nonzero(as_tuple=True)
            y = self.experts.one(x_ND[tokens], number) * weights_NK[tokens, place, None]
            y_ND = y_ND.index_add(0, tokens, y.to(y_ND.dtype))
        return y_ND, _shares(logits_NE, counts_E)


class Experts(nn.Module):
    """The experts' weights, those of each kind in one tensor."""

    def __init__(self, width: int, hidden: int, num_experts: int, activation: Activation) -> None:
        super().__init__()
        for name in ("up", "gate", "down") if activation == "swiglu" else ("up", "down"):
            shape = (width, hidden) if name == "down" else (hidden, width)
            weight, bias = torch.empty(num_experts, *shape), torch.empty(num_experts, shape[0])
            self.register_parameter(f"{name}_weight", nn.Parameter(weight))
            self.register_parameter(f"{name}_bias", nn.Parameter(bias))

    def one(self, x: Tensor, number: int) -> Tensor:
        """One expert's output."""

        def layer(name: str, x: Tensor) -> Tensor:
            weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
            return F.linear(x, weight[number], bias[number])

        up = layer("up", x)
        inner = F.silu(layer("gate", x)) * up if hasattr(self, "gate_weight") else F.gelu(up)
        return layer("down", inner)


def _shares(logits_NE: Tensor, counts_E: Tensor) -> Tensor:
    """The load-balance loss (Switch Transformer, arXiv:2101.03961) and the busiest one's share.

    Both are 1 where every expert gets as many tokens.
    """
    num_experts = logits_NE.shape[1]
    load_E = num_experts * counts_E / counts_E.sum()
    balance = (load_E * logits_NE.softmax(dim=-1).mean(dim=0)).sum()
    return torch.stack([balance, cast(Tensor, load_E.amax()).to(balance.dtype)])
