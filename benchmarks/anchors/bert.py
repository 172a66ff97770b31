"""BERT with its question-answering head, as NVIDIA's examples write it out; for counting only.

B batch, T tokens, H heads, K width of a head, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HEAD, _WORDS, _POSITIONS, _DROPOUT = 64, 30_528, 512, 0.1
# Layers, width and tokens of the models in sizing/evidence/ground_truths.csv, by name.
BERTS = {
    "bert_base_384": (12, 768, 384),
    "bert_large_384": (24, 1024, 384),
    "bert_large_128": (24, 1024, 128),
    "bert_large_512": (24, 1024, 512),
}


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            layer(x_BTD).unflatten(-1, (-1, _HEAD)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        share_BHTT = F.dropout((q_BHTK @ k_BHTK.mT / _HEAD**0.5).softmax(-1), _DROPOUT)
        seen_BTD = self.out((share_BHTT @ v_BHTK).transpose(1, 2).flatten(2))
        x_BTD = self.norms[0](x_BTD + F.dropout(seen_BTD, _DROPOUT))
        thought_BTD = self.down(F.gelu(self.up(x_BTD)))
        out_BTD: Tensor = self.norms[1](x_BTD + F.dropout(thought_BTD, _DROPOUT))
        return out_BTD


class Bert(nn.Module):
    """An encoder and the two logits of each token: start and end of the answer."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(_WORDS, width), nn.Embedding(_POSITIONS, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(_Layer(width) for _ in range(layers)))
        self.answer = nn.Linear(width, 2)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1])
        x_BTD = self.norm(self.words(tokens_BT) + self.positions(places_T))
        logits_BT2: Tensor = self.answer(self.layers(F.dropout(x_BTD, _DROPOUT)))
        return logits_BT2
