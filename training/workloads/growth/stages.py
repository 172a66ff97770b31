"""The three phases of one run: dense, experts, grown; each starts as the one before has ended."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training.errors import UserError
from training.interchange import Writer
from training.workload import Batch, Inputs, Loss, Partial, Samples, Settings, Start, Train
from training.workloads.expansion import RewarmingAdamW, fill, scaled_groups
from training.workloads.expansion.adamw import Rewarming
from training.workloads.growth import evaluation
from training.workloads.growth.architecture import ModelConfig
from training.workloads.growth.config import GrowthConfig
from training.workloads.growth.expert_products import check_products
from training.workloads.growth.experts import choose_products
from training.workloads.growth.interchange import write_hugging_face
from training.workloads.growth.model import LanguageModel, parameter_counts
from training.workloads.growth.optimizer import BFloat16AdamW, has_weight_decay
from training.workloads.growth.text.tokens import token_samples, vocabulary_refusals
from training.workloads.growth.transitions import Transition, growth_layout

_log = logging.getLogger(__name__)

_BETAS = (0.9, 0.95)
_PRODUCTS = "expert_products"  # in the numerics key
Phase: TypeAlias = Literal["dense", "experts", "grown"]


class RewarmingBFloat16AdamW(Rewarming, BFloat16AdamW):
    """Both: moments in bfloat16, and new copies that warm up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPhase(Train):
    """A phase; what differs between them is the model, and how it starts."""

    config: GrowthConfig
    name: Phase

    @property
    def architecture(self) -> ModelConfig:
        """The phase's model, apart from its weights."""
        model: ModelConfig = getattr(self.config, f"{self.name}_model")
        return model

    @property
    def settings(self) -> Settings:
        """One learning rate over the run: up at its beginning, down in its last phase."""
        c = self.config
        # Accumulated gradients must stay until the last micro-batch.
        own = c.settings
        in_backward = c.is_lean(self.name) and own.micro_batch == own.global_batch
        decay = Decay(c.decay_share, own.final_lr_fraction)
        return replace(
            own,
            steps=getattr(c, f"{self.name}_steps"),
            schedule=decay if self.name == "grown" else "constant",
            warmup_steps=own.warmup_steps if self.name == "dense" else 0,
            clip_norm=None if in_backward else own.clip_norm,
            optimizer_in_backward=in_backward,
        )

    def model(self, i: Inputs) -> LanguageModel:
        return LanguageModel(self.architecture, recompute=self.config.is_recomputed(self.name))

    def numerics(
        self, m: nn.Module, i: Inputs, started_with: Mapping[str, str]
    ) -> Mapping[str, str]:
        """How this machine computes the experts: as the recipe says, or what is fastest on it."""
        c = self.config
        if self.name == "dense":
            return {}
        products: str = c.expert_products
        if products == "auto":
            products = choose_products(
                self.architecture,
                num_tokens=c.settings.micro_batch * c.context,
                device=i.device,
                dtype=getattr(torch, c.settings.precision),
                started_with=started_with.get(_PRODUCTS),
            )
        cast(LanguageModel, m).compute_experts_by(check_products(products))
        return {_PRODUCTS: products}

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Grow from the phase before, and check on held-out text that nothing has changed."""
        c, (total, active) = self.config, parameter_counts(self.architecture)
        facts = {"parameters": total, "active_parameters": active}
        _log.info(
            f"[{self.name}] {total:,} parameters, of which {active:,} compute a token; learning "
            f"rate {c.learning_rate:g}; on {i.device}"
        )
        # Opened by the first phase too: a split that is too short is told before, not after steps.
        windows = token_samples(i.dataset, "validation", c.context)
        if i.prior is None:
            return Start(facts=facts)
        m, transition = cast(LanguageModel, m), Transition(config=c, phase=self.name)
        fill(m, transition.model(i.prior.model, m.state_dict()))
        probe = range(min(c.probe_windows, len(windows)))
        tokens_BT = torch.stack([windows.get(k, -1, torch.Generator())["tokens"] for k in probe])
        found = transition.verification(m, i.prior.model, tokens_BT)
        state = transition.optimizer(i.prior)
        learned = transition.optimizer_verification(m, i.prior, state, tokens_BT, found.judged_B)
        failures = [*found.failures, *learned.failures]
        differences = {**found.facts, **learned.facts}
        _say_verified(self.name, transition.scaling, differences, failures)
        return Start(
            failures=[f"the growth from {i.prior.stage} failed: {each}" for each in failures],
            facts={**facts, **differences},
            optimizer=state,
        )

    def optimizer(self, m: nn.Module) -> Optimizer:
        """AdamW; what is divided by its copies in a wider model learns by as much slower."""
        c = self.config
        groups = scaled_groups(
            m.named_parameters(),
            growth_layout(is_tied=c.is_tied),
            c.factors if self.name == "grown" else {},
            lr=c.learning_rate,
            weight_decay=c.weight_decay,
            decays=has_weight_decay,
        )
        kind = RewarmingBFloat16AdamW if c.is_lean(self.name) else RewarmingAdamW
        # Not False, which would rule out torch's foreach as well.
        return kind(groups, betas=_BETAS, fused=c.fused_optimizer or None)

    def formats(self) -> Mapping[str, Writer]:
        """Hugging Face's folder."""
        return {"huggingface": write_hugging_face}

    def refusals(self, meta: Mapping[str, Any]) -> Sequence[str]:
        """Another vocabulary."""
        return vocabulary_refusals(meta, self.config.vocab_size)

    def samples(self, i: Inputs, split: str) -> Samples:
        c = self.config
        # An evaluation of a finished run may be on other text.
        if refused := self.refusals(i.dataset.meta):
            raise UserError(refused[0])
        most = c.eval_windows if split == "validation" else None
        return token_samples(i.dataset, split, c.context, most=most)

    def weight(self, b: Batch) -> float:
        tokens_BT: Tensor = b["tokens"]
        return float(tokens_BT[:, 1:].numel())

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        tokens_BT = b["tokens"]
        found = cast(LanguageModel, m).loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
        if self.name == "dense":
            return Loss(total=found.total)
        return Loss(
            total=found.total,
            mean=self.config.balance_weight * found.balance,
            metrics={"busiest_expert": (found.busiest, 1.0)},
        )

    def surrogate(self, m: nn.Module, b: Batch) -> Loss:
        """The loss if every expert had as many tokens; which gets which is read from data."""
        cast(LanguageModel, m).compute_experts_by("balanced")
        return self.loss(m, b, 0, 1)

    def example(self, size: int) -> Batch:
        """Text of one token: the shapes of a batch."""
        return {"tokens": torch.zeros(size, self.config.context + 1, dtype=torch.long)}

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """The loss and the perplexity of each window."""
        return evaluation.predictions(cast(LanguageModel, m), b)

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """How the model goes on with the beginnings of held-out texts."""
        evaluation.write_samples(cast(LanguageModel, m), i, self.config, out / "samples.md")

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        return evaluation.partial(m, b)

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        return evaluation.summarize(parts, out)


def _say_verified(
    phase: str, scaling: str, differences: Mapping[str, float], failures: Sequence[str]
) -> None:
    """The transition's own lines: what grew, how far off it is, and the verdict."""
    _log.info(f"[{phase}] scaling: {scaling}")
    found = ", ".join(
        f"{name.replace('_', ' ')} {value:.3g}"
        for name, value in differences.items()
        if name.endswith("_difference")
    )
    verdict = "FAILED" if failures else "PASSED: the same function, and it learns the same"
    _log.info(f"[{phase}] verification: {found}: {verdict}")


@dataclass(frozen=True, slots=True)
class Decay:
    """A schedule: constant, and in the last `share` of the steps down a line to `final`."""

    share: float
    final: float

    def __call__(self, step: int, num_steps: int) -> float:
        """The factor of a step."""
        left = (num_steps - step) / max(1.0, self.share * num_steps)
        return self.final + (1.0 - self.final) * min(1.0, left)


def phases(c: GrowthConfig) -> Sequence[TrainPhase]:
    """The phases in order."""
    return tuple(TrainPhase(config=c, name=name) for name in ("dense", "experts", "grown"))
