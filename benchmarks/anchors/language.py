"""The three phases of a published model-growth experiment, before there is a workload for them.

python -m sizing model benchmarks.anchors.language:phase1 --precision float32 --steps 100
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.preflight.config_json import Shape
from training.preflight.transformer import Ffn, Transformer

_TOKENS, _VOCABULARY = 256, 50257
# Of phase 3's eleven blocks the four new ones are dense: then its totals come within 1 % of those
# that were announced, which no architecture reaches exactly.
_DENSE, _DENSE_HIDDEN = (2, 5, 8, 10), 2496


def phase1(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """Dense: 100.04 M parameters."""
    return _with_batch(Transformer(_shape()), samples)


def phase2(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """Eight experts, two of them for each token: 371.64 M."""
    return _with_batch(Transformer(_shape(experts=8)), samples)


def phase3(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """Twice the width and four layers more: 1,479.9 M, nearest to what was announced."""
    model = Transformer(_shape(experts=8, growth=2, layers=11))
    dense = _shape(growth=2, hidden=_DENSE_HIDDEN)
    for place in _DENSE:
        block = model.blocks[place]
        block.ffn = Ffn(dense)
    return _with_batch(model, samples)


def phase3_literal(samples: int) -> tuple[nn.Module, Tensor, Any]:
    """The same growth to the letter, every new layer with experts: 2,155.8 M."""
    return _with_batch(Transformer(_shape(experts=8, growth=2, layers=11)), samples)


def _shape(
    *, experts: int = 0, growth: int = 1, layers: int = 7, hidden: int | None = None
) -> Shape:
    return Shape(
        width=832 * growth,
        layers=layers,
        heads=8 * growth,
        key_heads=8 * growth,
        head_width=104,
        hidden=hidden or 3328 * growth,
        causal=True,
        vocabulary=_VOCABULARY,
        experts=experts,
        experts_per_token=2 if experts else 0,
    )


def _with_batch(model: nn.Module, samples: int) -> tuple[nn.Module, Tensor, Any]:
    return model, torch.zeros(samples, _TOKENS, dtype=torch.long), _loss


def _loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
