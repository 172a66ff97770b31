"""The shape of a transformer, read from its config.json as Hugging Face's libraries write it.

Families that are not known are refused: a guessed shape would be priced like a counted one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
