"""The language model's tensors in the words of expansion/: what grows, and how."""

from training.workloads.expansion import Layout

ROUTER = "blocks.*.ffn.router"  # the modules whose outputs are router logits

_TENSORS = {
    "embedding.weight": "vocabulary width",
    "head.weight": "vocabulary <- width",
    "final_norm.weight": "width",
    "final_norm.bias": "width",
    "blocks.*.attention_norm.weight": "width",
    "blocks.*.attention_norm.bias": "width",
    "blocks.*.attention.query.weight": "heads <- width",
    "blocks.*.attention.query.bias": "heads",
    "blocks.*.attention.key.weight": "heads <- width",
    "blocks.*.attention.key.bias": "heads",
    "blocks.*.attention.value.weight": "heads <- width",
    "blocks.*.attention.value.bias": "heads",
    "blocks.*.attention.output.weight": "+width <- heads",
    "blocks.*.attention.output.bias": "+width",
    "blocks.*.ffn_norm.weight": "width",
    "blocks.*.ffn_norm.bias": "width",
    "blocks.*.ffn.up.weight": "hidden <- width",
    "blocks.*.ffn.up.bias": "hidden",
    "blocks.*.ffn.gate.weight": "hidden <- width",
    "blocks.*.ffn.gate.bias": "hidden",
    "blocks.*.ffn.down.weight": "+width <- hidden",
    "blocks.*.ffn.down.bias": "+width",
    "blocks.*.ffn.router.weight": "experts <- width",
    "blocks.*.ffn.router.bias": "experts",
    "blocks.*.ffn.experts.up_weight": "experts hidden <- width",
    "blocks.*.ffn.experts.up_bias": "experts hidden",
    "blocks.*.ffn.experts.gate_weight": "experts hidden <- width",
    "blocks.*.ffn.experts.gate_bias": "experts hidden",
    "blocks.*.ffn.experts.down_weight": "experts +width <- hidden",
    "blocks.*.ffn.experts.down_bias": "experts +width",
}


def growth_layout(*, is_tied: bool = True) -> Layout:
    """The layout of `LanguageModel`, dense or with experts; a tied head reads the embedding."""
    return Layout(
        tensors=_TENSORS,
        divided=("final_norm.weight", "final_norm.bias") if is_tied else (),
        experts={
            f"blocks.*.ffn.{part}.{kind}": f"blocks.*.ffn.experts.{part}_{kind}"
            for part in ("up", "gate", "down")
            for kind in ("weight", "bias")
        },
        routers=("blocks.*.ffn.router.weight", "blocks.*.ffn.router.bias"),
    )
