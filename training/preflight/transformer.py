"""Transformers by their config.json, rebuilt to be counted: shapes and costs, never weights.

B batch, T tokens, D width, H heads, K heads of keys, E experts. What is not counted: dropout of
attention (a GPU's kernel keeps no mask), and the padding of experts: each gets the average.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.preflight.config_json import Shape


def _norm(shape: Shape) -> nn.Module:
    return nn.RMSNorm(shape.width) if shape.rms_norm else nn.LayerNorm(shape.width)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inside, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
        self.query = nn.Linear(shape.width, inside, bias=shape.query_biases)
        self.key = nn.Linear(shape.width, keys, bias=shape.query_biases)
        self.value = nn.Linear(shape.width, keys, bias=shape.query_biases)
        self.out = nn.Linear(inside, shape.width, bias=shape.biases)

    def forward(self, x_BTD: Tensor) -> Tensor:
        shape = self.shape
        q, k, v = (
            part(x_BTD).unflatten(-1, (-1, shape.head_width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if shape.positions == 0:
            q, k = _rotate(q), _rotate(k)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.key_heads
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def _rotate(x_BHTD: Tensor) -> Tensor:
    """Rotary positions; every angle costs the same, so all are the same."""
    low, high = x_BHTD.chunk(2, -1)
    angle = torch.ones_like(x_BHTD[:1, :1])
    return x_BHTD * angle + torch.cat([-high, low], -1) * angle


class _Ffn(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=shape.biases) if shape.gated else None
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.biases)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.biases)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.up(x)
        inside = F.gelu(inside) if self.gate is None else F.silu(self.gate(x)) * inside
        out: Tensor = self.down(inside)
        return out


class _Experts(nn.Module):
    """Every expert gets the average number of tokens: which ones does not change the work."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.per_token = shape.experts_per_token
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(_Ffn(shape) for _ in range(shape.experts))

    def forward(self, x_BTD: Tensor) -> Tensor:
        tokens_ND = x_BTD.flatten(0, 1)
        share_NE = self.router(tokens_ND).softmax(-1)
        rows = max(1, self.per_token * len(tokens_ND) // len(self.experts))
        out_ND = torch.zeros_like(tokens_ND)
        for number, expert in enumerate(self.experts):
            taken = torch.arange(rows, device=tokens_ND.device)
            weighted = expert(tokens_ND[taken]) * share_NE[taken, number : number + 1]
            out_ND = out_ND.index_add(0, taken, weighted.to(out_ND.dtype))
        return out_ND.view_as(x_BTD)


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_norm(shape) for _ in range(2))
        self.attention = _Attention(shape)
        self.ffn = _Experts(shape) if shape.experts else _Ffn(shape)
        self.dropout = shape.dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + F.dropout(self.attention(self.norms[0](x_BTD)), self.dropout, self.training)
        y_BTD = F.dropout(self.ffn(self.norms[1](x_BTD)), self.dropout, self.training)
        return x_BTD + y_BTD


class Transformer(nn.Module):
    """A decoder, an encoder or a vision transformer; where norms stand costs nothing."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        if shape.patch:
            self.patches = nn.Conv2d(shape.channels, shape.width, shape.patch, shape.patch)
            self.first = nn.Parameter(torch.zeros(1, 1, shape.width))
        else:
            self.words = nn.Embedding(shape.vocabulary, shape.width)
        if shape.positions:
            self.places = nn.Embedding(shape.positions, shape.width)
        if shape.token_types:
            self.types = nn.Embedding(shape.token_types, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        # Decoders and vision end with a norm, encoders of text start with one.
        self.norm = _norm(shape)
        if shape.head == "untied":
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        elif shape.head == "classes":
            self.head = nn.Linear(shape.width, shape.classes)
        elif shape.head == "masked":
            self.transform = nn.Linear(shape.width, shape.width)
            self.transform_norm = _norm(shape)
            self.head_bias = nn.Parameter(torch.zeros(shape.vocabulary))

    def forward(self, inputs: Tensor) -> Tensor:
        shape = self.shape
        if shape.patch:
            x_BTD = self.patches(inputs).flatten(2).transpose(1, 2)
            x_BTD = torch.cat([self.first.expand(len(x_BTD), -1, -1), x_BTD], 1)
        else:
            x_BTD = self.words(inputs)
        if shape.positions:
            x_BTD = x_BTD + self.places.weight[: x_BTD.shape[1]]
        if shape.token_types:
            x_BTD = x_BTD + self.types.weight[0]
        x_BTD = F.dropout(x_BTD, shape.dropout, self.training)
        if shape.head == "masked":
            x_BTD = self.norm(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        if shape.head == "masked":
            x_BTD = self.transform_norm(F.gelu(self.transform(x_BTD)))
            return F.linear(x_BTD, self.words.weight, self.head_bias)
        x_BTD = self.norm(x_BTD)
        if shape.head == "classes":
            return self.head(x_BTD[:, 0])  # type: ignore[no-any-return]
        return F.linear(x_BTD, self.words.weight if shape.head == "tied" else self.head.weight)
