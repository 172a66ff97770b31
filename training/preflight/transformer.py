"""Transformers by their config.json, rebuilt to be counted: shapes and costs, never weights.

Families that are not known are refused: a guessed shape would be priced like a counted one. What is
not counted: dropout of attention (a GPU's kernel keeps no mask), and the padding of experts.
B batch, T tokens, D width, H heads, K heads of keys, E experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Head = Literal["tied", "untied", "masked", "classes"]
# The keys that count something; in the second set null means that they are not given.
_WHOLE = frozenset(
    [
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("n_embd", "n_layer", "n_head", "n_positions", "dim", "n_layers", "n_heads"),
        *("hidden_dim", "vocab_size", "max_position_embeddings", "type_vocab_size"),
        *("num_local_experts", "num_experts_per_tok", "image_size", "patch_size", "num_channels"),
    ]
)
_OR_NULL = frozenset(["num_key_value_heads", "head_dim", "n_inner"])
# Nobody publishes more; a slip of some zeros would build modules until the memory is full.
_MOST_BLOCKS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What decides a transformer's parameters and work; no field is a guess of ours."""

    width: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    hidden: int
    gated: bool = False
    rms_norm: bool = False
    biases: bool = True
    query_biases: bool = True
    causal: bool = False
    vocabulary: int = 0
    positions: int = 0  # learned ones; 0: rotary
    token_types: int = 0
    experts: int = 0
    experts_per_token: int = 0
    patch: int = 0
    image: int = 0
    channels: int = 3
    classes: int = 0
    head: _Head = "tied"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "key_heads", "head_width", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.layers * max(1, self.experts) > _MOST_BLOCKS:
            raise ValueError(
                f"{self.layers} layers with {max(1, self.experts)} experts each are more than "
                f"{_MOST_BLOCKS:,} blocks; check them"
            )
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"num_experts_per_tok is {self.experts_per_token}, of {self.experts} experts"
            )
        if self.patch > self.image:
            raise ValueError(f"patch_size is {self.patch}, image_size {self.image}")
        if self.heads % self.key_heads:
            raise ValueError(
                f"{self.heads} heads do not share {self.key_heads} heads of keys evenly"
            )


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape that a config.json describes; an unknown family is a ValueError."""
    if not isinstance(config, Mapping):
        raise ValueError("a config.json is an object with a model_type")
    family = config.get("model_type")
    read = _FAMILIES.get(str(family))
    if read is None:
        raise ValueError(
            f"model_type {family!r} cannot be counted from its config; known are "
            f"{', '.join(sorted(_FAMILIES))}. For any other model: python -m sizing model "
            "package.module:function"
        )
    for key in (_WHOLE | _OR_NULL) & config.keys():
        value = config[key]
        if value is None and key in _OR_NULL:
            continue
        if type(value) is not int or value < 1:
            raise ValueError(f"{key} is {value!r}; give a whole number from 1")
    try:
        return read(config)
    except KeyError as error:
        raise ValueError(f"a config of model_type {family!r} needs the key {error}") from None


def _blocks(width: int, layers: int, heads: int) -> dict[str, Any]:
    """The sizes of blocks in which each head has keys of its own."""
    return {
        "width": width,
        "layers": layers,
        "heads": heads,
        "key_heads": heads,
        "head_width": width // heads,
    }


def _decoder(c: Mapping[str, Any]) -> Shape:
    """llama and its kin: rotary, gated, RMSNorm."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    biased = bool(c.get("attention_bias", False))
    has_experts = c["model_type"] == "mixtral"
    return Shape(
        width=width,
        layers=c["num_hidden_layers"],
        heads=heads,
        key_heads=c.get("num_key_value_heads") or heads,
        head_width=c.get("head_dim") or width // heads,
        hidden=c["intermediate_size"],
        gated=True,
        rms_norm=True,
        biases=bool(c.get("mlp_bias", False)),
        query_biases=biased or c["model_type"] == "qwen2",
        causal=True,
        vocabulary=c["vocab_size"],
        experts=c["num_local_experts"] if has_experts else 0,
        experts_per_token=c["num_experts_per_tok"] if has_experts else 0,
        head="tied" if c.get("tie_word_embeddings", c["model_type"] == "gemma") else "untied",
    )


def _gpt2(c: Mapping[str, Any]) -> Shape:
    return Shape(
        **_blocks(c["n_embd"], c["n_layer"], c["n_head"]),
        hidden=c.get("n_inner") or 4 * c["n_embd"],
        causal=True,
        vocabulary=c["vocab_size"],
        positions=c["n_positions"],
        dropout=c.get("resid_pdrop", 0.1),
    )


def _gpt_neox(c: Mapping[str, Any]) -> Shape:
    return Shape(
        **_blocks(c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]),
        hidden=c["intermediate_size"],
        causal=True,
        vocabulary=c["vocab_size"],
        head="tied" if c.get("tie_word_embeddings") else "untied",
    )


def _bert(c: Mapping[str, Any]) -> Shape:
    return Shape(
        **_blocks(c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]),
        hidden=c["intermediate_size"],
        vocabulary=c["vocab_size"],
        positions=c["max_position_embeddings"],
        token_types=c.get("type_vocab_size", 2),
        head="masked",
        dropout=c.get("hidden_dropout_prob", 0.1),
    )


def _distilbert(c: Mapping[str, Any]) -> Shape:
    return Shape(
        **_blocks(c["dim"], c["n_layers"], c["n_heads"]),
        hidden=c["hidden_dim"],
        vocabulary=c["vocab_size"],
        positions=c["max_position_embeddings"],
        head="masked",
        dropout=c.get("dropout", 0.1),
    )


def _vit(c: Mapping[str, Any]) -> Shape:
    patch, image = c["patch_size"], c["image_size"]
    return Shape(
        **_blocks(c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]),
        hidden=c["intermediate_size"],
        query_biases=c.get("qkv_bias", True),
        positions=(image // patch) ** 2 + 1,
        patch=patch,
        image=image,
        channels=c.get("num_channels", 3),
        classes=len(c.get("id2label") or ()) or 1000,
        head="classes",
        dropout=c.get("hidden_dropout_prob", 0.0),
    )


_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "gemma", "phi3"), _decoder),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
    "roberta": _bert,
    "distilbert": _distilbert,
    "vit": _vit,
}


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
