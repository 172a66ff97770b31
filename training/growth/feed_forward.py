"""A block's feed-forward network."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from training.growth.architecture import Activation


def linear(num_inputs: int, num_outputs: int, *, bias: bool = True) -> nn.Linear:
    """A linear layer whose weights are yet to be drawn or loaded."""
    device = torch.get_default_device()
    return cast(nn.Linear, skip_init(nn.Linear, num_inputs, num_outputs, bias=bias, device=device))


class FeedForward(nn.Module):
    """down(gelu(up(x))), or SwiGLU's down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.up = linear(width, hidden)
        self.gate = linear(width, hidden) if activation == "swiglu" else None
        self.down = linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up
        return cast(Tensor, self.down(inner))
