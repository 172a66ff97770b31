"""Models of nobody's workload, as users hand them to `python -m training count`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tied(nn.Module):
    """Reads numbers when it is built, and shares its only matrix with its head."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = [x.item() for x in torch.linspace(0, 1, 3)]
        self.words = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(tokens))
        return out


def linear() -> tuple[nn.Module, Tensor]:
    """A model and an example batch: no size, no loss."""
    return nn.Linear(64, 10), torch.zeros(4, 64)


def with_loss(samples: int) -> tuple[nn.Module, Any, Any]:
    """A batch of the size asked for, with labels, and a loss."""
    batch = (torch.zeros(samples, 64), torch.zeros(samples, dtype=torch.long))
    return nn.Linear(64, 10), batch, lambda m, b: F.cross_entropy(m(b[0]), b[1])


def tied(samples: int) -> tuple[nn.Module, Tensor]:
    """A model that cannot be built on fake tensors."""
    return Tied(), torch.zeros(samples, 6, dtype=torch.long)


def reads() -> tuple[nn.Module, Tensor, Any]:
    """A loss that depends on the data."""
    return nn.Linear(4, 1), torch.zeros(2, 4), lambda m, b: m(b[: int(b.sum().item()) + 1]).sum()


def nothing() -> str:
    """Not what is asked for."""
    return "a model"


def raises() -> None:
    """Code that cannot work."""
    raise KeyError("width")


def misfit() -> tuple[nn.Module, Tensor]:
    """A model that its own batch does not fit."""
    return nn.Linear(6, 3), torch.zeros(4, 5)
