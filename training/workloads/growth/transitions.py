"""A phase's start: the model and optimizer of the previous phase, grown.

Pure functions of that phase's commit and the seed, on the CPU, which are simply repeated after an
interruption. Tensors are made one at a time, so neither state is in memory twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from training import OptimizerState, Prior
from training.workloads.expansion import (
    Layout,
    OptimizerVerification,
    Verification,
    block_origins,
    deepen,
    deepen_optimizer,
    gradients,
    observe,
    places,
    upcycle,
    upcycle_optimizer,
    verify,
    verify_optimizer,
    widen,
    widen_optimizer,
)
from training.workloads.expansion.layout import OnDemand
from training.workloads.growth.config import GrowthConfig, ModelConfig
from training.workloads.growth.experts import ExpertFeedForward
from training.workloads.growth.model import LanguageModel

_ROUTER = "blocks.*.ffn.router"  # the modules whose outputs are router logits

# What a module's weight computes, its bias has, too.
_MODULES = {
    "final_norm.": "width",
    "blocks.*.attention_norm.": "width",
    "blocks.*.attention.query.": "heads <- width",
    "blocks.*.attention.key.": "heads <- width",
    "blocks.*.attention.value.": "heads <- width",
    "blocks.*.attention.output.": "+width <- heads",
    "blocks.*.ffn_norm.": "width",
    "blocks.*.ffn.up.": "hidden <- width",
    "blocks.*.ffn.gate.": "hidden <- width",
    "blocks.*.ffn.down.": "+width <- hidden",
    "blocks.*.ffn.router.": "experts <- width",
    "blocks.*.ffn.experts.up_": "experts hidden <- width",
    "blocks.*.ffn.experts.gate_": "experts hidden <- width",
    "blocks.*.ffn.experts.down_": "experts +width <- hidden",
}
_TENSORS = {
    "embedding.weight": "vocabulary width",
    "head.weight": "vocabulary <- width",
    **{f"{name}weight": axes for name, axes in _MODULES.items()},
    **{f"{name}bias": axes.partition(" <-")[0] for name, axes in _MODULES.items()},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """The growth into one phase: "experts", or "grown"."""

    config: GrowthConfig
    phase: str

    @property
    def scaling(self) -> str:
        """A description of what grows."""
        c = self.config
        if self.phase == "experts":
            return f"{c.num_experts} experts in each block, {c.top_k} for each token"
        return (
            f"x{c.width_factor} width ({c.width} to {c.width_factor * c.width}), +{c.new_layers} "
            f"layers ({c.num_layers} to {c.num_layers + c.new_layers})"
        )

    @property
    def before(self) -> ModelConfig:
        """The model that grows."""
        c = self.config
        return c.experts_model if self.phase == "grown" else c.dense_model

    def model(
        self, prior: Mapping[str, Tensor], fresh: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the grown state; its routers and new blocks come from `fresh`."""
        c, layout = self.config, growth_layout(is_tied=self.config.is_tied)
        if self.phase == "experts":
            return upcycle(prior, layout, num_experts=c.num_experts, fresh=fresh)
        wide = widen(prior, layout, c.factors, split_noise=c.split_noise, seed=c.seed)
        return deepen(wide, layout, after=c.new_after, fresh=fresh)

    def optimizer(self, prior: Prior) -> OptimizerState:
        """Return the optimizer's grown state, in its own types; empty if not carried over."""
        c, layout = self.config, growth_layout(is_tied=self.config.is_tied)
        if c.carry == "none":
            return {}
        state = prior.optimizer()
        if self.phase == "experts":
            grown = upcycle_optimizer(state, layout, num_experts=c.num_experts, top_k=c.top_k)
        else:
            rewarm_steps = c.rewarm_steps if c.carry == "asymmetric" else None
            wide = widen_optimizer(state, layout, c.factors, rewarm_steps=rewarm_steps)
            grown = deepen_optimizer(wide, layout, num_blocks=c.num_layers, after=c.new_after)
        moments = torch.bfloat16 if c.is_lean(self.phase) else torch.float32
        return OnDemand({name: partial(_in_type, grown, name, moments) for name in grown})

    def verification(
        self, m: LanguageModel, prior: Mapping[str, Tensor], tokens_BT: Tensor
    ) -> Verification:
        """Compare the grown model with the previous one on a fixed batch of held-out text."""
        with torch.device("meta"):
            small = LanguageModel(self.before, initialize=False)
        small.load_state_dict(dict(prior), assign=True)
        ids_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        is_grown = self.phase == "grown"
        origins = block_origins(self.config.num_layers, self.config.new_after) if is_grown else None
        router = _ROUTER if is_grown else None
        chosen = next(each for each in m.modules() if isinstance(each, ExpertFeedForward)).products
        m.compute_experts_by("split")  # which works on every device, here the CPU
        before = observe(small, lambda: small(ids_BT), targets_BT, router=router)
        after = observe(m, lambda: m(ids_BT), targets_BT, router=_ROUTER, origins=origins)
        m.compute_experts_by(chosen)
        return verify(before, after, top_k=self.config.top_k)

    def optimizer_verification(
        self,
        m: LanguageModel,
        prior: Prior,
        grown: OptimizerState,
        tokens_BT: Tensor,
        judged_B: Tensor,
    ) -> OptimizerVerification:
        """Compare gradients of that text's loss, and the moments.

        Texts that are not `judged_B`, because a near-tie sent them to other experts, are left out.
        """
        c, is_grown = self.config, self.phase == "grown"
        with torch.device("meta"):
            small = LanguageModel(self.before, initialize=False)
        small.load_state_dict(dict(prior.model), assign=True)
        judged_BT = tokens_BT[judged_B]

        def loss_of(model: LanguageModel) -> Tensor:
            return model.loss(judged_BT[:, :-1], judged_BT[:, 1:]).total / judged_BT.numel()

        before = gradients(small, lambda: loss_of(small))
        where = places(
            list(before),
            growth_layout(is_tied=c.is_tied),
            factors=c.factors if is_grown else {},
            origins=block_origins(c.num_layers, c.new_after) if is_grown else None,
            num_experts=0 if is_grown else c.num_experts,
            top_k=c.top_k,
        )
        by_name = {place.name: place for place in where.values()}

        def folded(name: str, gradient: Tensor) -> Tensor | None:
            return by_name[name].fold(gradient) if name in by_name else None

        chosen = next(each for each in m.modules() if isinstance(each, ExpertFeedForward)).products
        m.compute_experts_by("split")
        after = gradients(m, lambda: loss_of(m), folded)
        m.compute_experts_by(chosen)
        return verify_optimizer(before, after, where, prior.optimizer() if grown else {}, grown)


def _in_type(state: OptimizerState, name: str, moments: torch.dtype) -> Mapping[str, Any]:
    return {
        key: value.to(moments) if key.startswith("exp_avg") else value
        for key, value in state[name].items()
    }


def growth_layout(*, is_tied: bool = True) -> Layout:
    """Return the layout of `LanguageModel`, also with experts; a tied head reads the embedding."""
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
