"""A block's feed-forward network."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from training.workloads.growth.architecture import Activation


class FeedForward(nn.Module):
    """down(gelu(up(x))), or SwiGLU's down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.gate = nn.Linear(width, hidden) if activation == "swiglu" else None
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up
        return cast(Tensor, self.down(inner))
