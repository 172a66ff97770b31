"""The recipes: one for a laptop, two for one A10G of 24 GB, one for the tests."""

from dataclasses import replace

from training.workloads.growth.config import SETTINGS, GrowthConfig


def laptop() -> GrowthConfig:
    """The three phases in some minutes on one CPU thread."""
    return GrowthConfig()


def full() -> GrowthConfig:
    """100 M dense, 372 M with experts, 1,480 M grown: what an A10G of 24 GB can train.

    1,467.60 M, which is quoted for the last model, has no natural solution (docs/growth.md); this
    is the nearest that doubles every expert: the new blocks are dense.
    """
    return GrowthConfig(
        num_threads=4,
        # Attention's and the experts' fast backward passes on CUDA are not deterministic.
        deterministic=False,
        vocab_size=50257,
        context=256,
        width=832,
        num_heads=8,
        num_layers=7,
        hidden=3328,
        new_layers=4,
        new_kind="dense",
        new_hidden=2496,
        dense_steps=1000,
        experts_steps=1000,
        grown_steps=1000,
        settings=replace(
            SETTINGS,
            warmup_steps=100,
            evaluate_every_steps=250,
            precision="bfloat16",
            loader_workers="auto",
        ),
        learning_rate=3e-4,
        fused_optimizer=True,
        expert_products="auto",
        lean_optimizer="grown",
        recompute="grown",
        sample_tokens=100,
    )


def literal() -> GrowthConfig:
    """As `full`, but everything is doubled, the new blocks have experts too: 2,156 M.

    Fits an A10G as `full` does: by the moments in bfloat16 and the optimizer in backward.
    """
    return replace(full(), new_kind="experts", new_hidden=6656)
