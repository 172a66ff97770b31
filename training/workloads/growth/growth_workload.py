"""The growth workload: a language model trained dense, with experts, and grown, in one run.

python -m training data make --workload growth --out data --count 12000
python -m training run --workload growth --recipe laptop --dataset-uri data --run-uri runs/first

Three phases: dense, experts, grown; each starts where the previous one ended. A lean AdamW keeps
both moments in bfloat16: 4 bytes per parameter instead of 8.

Evaluation on held-out text: a model's perplexity, and how evenly its experts share the text.

For people, also how the model continues held-out texts: without a cache of keys and values, which
would not pay off for a few samples at the end of a phase.

B batch, T tokens, N = B x T, E experts, K experts of a token, L blocks with experts.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from contract.errors import UserError
from training import (
    Batch,
    Inputs,
    Loss,
    Partial,
    Progress,
    Rung,
    Samples,
    Settings,
    Start,
    Train,
    Workload,
    Writer,
    autocast_rungs,
    micro_batch_rungs,
    rung,
    write_table,
)
from training.durable import SourceFile
from training.workloads.expansion import RewarmingAdamW, fill, scaled_groups
from training.workloads.expansion.adamw import Rewarming
from training.workloads.growth.config import GrowthConfig, ModelConfig, full, laptop, literal
from training.workloads.growth.experts import ExpertFeedForward, ExpertProducts, choose_products
from training.workloads.growth.hugging_face import write_hugging_face
from training.workloads.growth.model import LanguageModel, parameter_counts
from training.workloads.growth.optimizer import BFloat16AdamW
from training.workloads.growth.text.text_dataset import TextOptions, import_dataset, make_dataset
from training.workloads.growth.text.tokens import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    Vocabulary,
    encode,
    length_refusals,
    load_tokenizer,
    open_tokens,
    read_vocabulary,
    token_samples,
    vocabulary_refusals,
)
from training.workloads.growth.transitions import Transition, growth_layout

_TEMPERATURE = 0.7
_TOP_K = 20
# transformers' class for a tokenizer.json of no model of its own.
_FAST = "PreTrainedTokenizerFast"


class TextEvaluation(Train):
    """Evaluation, prediction and samples by every phase's trained model."""

    config: GrowthConfig

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Return the cross-entropy of a batch, and the tokens of each expert."""
        tokens_BT, m = b["tokens"], cast(LanguageModel, m)
        with _counting_experts(m) as counts:
            total = m.loss(tokens_BT[:, :-1], tokens_BT[:, 1:]).total
        loads = {"tokens_LE": torch.stack(counts).cpu()} if counts else {}
        count = float(tokens_BT[:, 1:].numel())
        return Partial(sums={"loss": (total.item(), count)}, tensors=loads)

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """Return the loss and perplexity of each individual window."""
        found = []
        for tokens_1T in b["tokens"].split(1):
            total = cast(LanguageModel, m).loss(tokens_1T[:, :-1], tokens_1T[:, 1:]).total.item()
            loss = total / (tokens_1T.shape[1] - 1)
            found.append({"loss": loss, "perplexity": _perplexity(loss)})
        return found

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Return the metrics of one evaluation; write the experts' loads, if any, to `out`."""
        loss = super().summarize(parts, out)["loss"]
        metrics = {"perplexity": _perplexity(loss), "loss": loss}
        loads = [part.tensors["tokens_LE"] for part in parts if part.tensors]
        if loads:
            share_LE = _shares(torch.stack(loads).sum(dim=0))
            # 1: every expert gets the same; num_experts / top_k: the busiest gets every token.
            metrics["busiest_expert"] = float(share_LE.amax(dim=1).mean())
            metrics["idlest_expert"] = float(share_LE.amin(dim=1).mean())
            names = ["block of experts", *(f"expert {e}" for e in range(share_LE.shape[1]))]
            rows = ((number, *shares) for number, shares in enumerate(share_LE.tolist()))
            write_table(out / "experts.csv", names, rows)
        return metrics

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Write how the model continues the beginnings of held-out texts."""
        c, path = self.config, out / "samples.md"
        tokens = open_tokens(i.dataset, "validation")
        beginnings = tokens.beginnings(c.num_shown, c.prompt_tokens)
        if not beginnings:
            path.write_text(f"No held-out text is longer than {c.prompt_tokens} tokens.\n")
            return
        texts_BT = _generate(
            cast(LanguageModel, m),
            torch.stack(beginnings).to(i.device),
            c.sample_tokens,
            context=c.context,
            temperature=_TEMPERATURE,
            seed=i.seed,
        )
        vocabulary = read_vocabulary(i.dataset.file(TOKENIZER_FILE))
        texts = []
        for ids in texts_BT.tolist():
            begun = vocabulary.text(ids[: c.prompt_tokens])
            texts.append(f"**{begun}**{_one_text(ids[c.prompt_tokens :], vocabulary)}\n")
        path.write_text("\n".join(texts), encoding="utf-8")

    def continued(
        self, m: nn.Module, i: Inputs, prompts: Sequence[str], how: tuple[int, float, int]
    ) -> Sequence[str]:
        """Continue each prompt up to the end of its text."""
        c, path, texts = self.config, i.dataset.file(TOKENIZER_FILE), []
        num_tokens, temperature, seed = how
        vocabulary = read_vocabulary(path)
        for prompt, ids in zip(prompts, encode(load_tokenizer(path), prompts), strict=True):
            if not len(ids):
                raise UserError(f"--prompt is {prompt!r}, which has no token; write a beginning")
            begun_1T = torch.from_numpy(ids)[None].to(i.device)
            found_1T = _generate(
                *(cast(LanguageModel, m), begun_1T, num_tokens or c.sample_tokens),
                context=c.context,
                temperature=temperature,
                seed=seed,
            )
            texts.append(_one_text(found_1T[0, len(ids) :].tolist(), vocabulary))
        return texts

    def companions(
        self, meta: Mapping[str, Any], read: Callable[[str], bytes]
    ) -> Mapping[str, bytes]:
        """Return the tokenizer as transformers reads it, and where generation stops."""
        end = meta["end_of_text"]
        about = {"tokenizer_class": _FAST, "eos_token": END_OF_TEXT}
        written = {
            "tokenizer_config.json": {**about, "model_max_length": self.config.context},
            "generation_config.json": {"eos_token_id": end, "pad_token_id": end},
        }
        files = {name: json.dumps(content).encode() for name, content in written.items()}
        return {TOKENIZER_FILE: read(TOKENIZER_FILE), **files}


def _one_text(made: list[int], vocabulary: Vocabulary) -> str:
    """Return tokens as text, up to the end of the text: what follows is a new one."""
    ends = vocabulary.end_of_text
    return vocabulary.text(made[: made.index(ends)] if ends in made else made)


@contextmanager
def _counting_experts(model: LanguageModel) -> Iterator[list[Tensor]]:
    """Yield a list to which each block with experts appends its tokens by expert, in order."""
    counts: list[Tensor] = []

    def count(top_k: int) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(router: nn.Module, inputs: object, logits_NE: Tensor) -> None:
            chosen_NK = logits_NE.topk(top_k, dim=-1).indices
            counts.append(chosen_NK.flatten().bincount(minlength=logits_NE.shape[-1]))

        return hook

    experts = [m for m in model.modules() if isinstance(m, ExpertFeedForward)]
    hooks = [each.router.register_forward_hook(count(each.top_k)) for each in experts]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _perplexity(loss: float) -> float:
    # Above e^60, the number has no meaning and would soon overflow.
    return math.exp(min(loss, 60.0))


def _shares(tokens_LE: Tensor) -> Tensor:
    """Return each expert's tokens as a multiple of its even share."""
    return tokens_LE * tokens_LE.shape[1] / tokens_LE.sum(dim=1, keepdim=True)


@torch.no_grad()
def _generate(
    model: LanguageModel,
    prompt_BT: Tensor,
    num_tokens: int,
    *,
    context: int,
    temperature: float,
    seed: int,
) -> Tensor:
    """Continue each prompt by `num_tokens` tokens; the model sees the last `context` of them.

    The same seed gives the same text; at temperature 0, each token is the likeliest.
    """
    tokens_BT, generator = prompt_BT, torch.Generator(prompt_BT.device).manual_seed(seed)
    for _ in range(num_tokens):
        last_BD = model.hidden(tokens_BT[:, -context:]).y_BTD[:, -1]
        logits_BV = F.linear(last_BD, model.output_weight_VD).float()
        likeliest, tokens_BK = logits_BV.topk(min(_TOP_K, logits_BV.shape[1]))
        drawn_B1 = tokens_BK[:, :1]
        if temperature:
            shares_BK = (likeliest / temperature).softmax(dim=-1)
            drawn_B1 = tokens_BK.gather(1, torch.multinomial(shares_BK, 1, generator=generator))
        tokens_BT = torch.cat([tokens_BT, drawn_B1], dim=1)
    return tokens_BT


def _has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter decays: matrices and embedding do, biases and norms do not."""
    return not name.endswith("bias") and "norm" not in name


_log = logging.getLogger(__name__)

_BETAS = (0.9, 0.95)
_PRODUCTS = "expert_products"  # in the numerics key
_Phase: TypeAlias = Literal["dense", "experts", "grown"]
_PHASES: tuple[_Phase, ...] = get_args(_Phase)


class _RewarmingBFloat16AdamW(Rewarming, BFloat16AdamW):
    """AdamW with moments in bfloat16, in which new copies warm up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPhase(TextEvaluation):
    """A phase; phases differ in the model, and in how it starts."""

    config: GrowthConfig
    name: _Phase

    @property
    def architecture(self) -> ModelConfig:
        """The phase's model, without its weights."""
        model: ModelConfig = getattr(self.config, f"{self.name}_model")
        return model

    @property
    def settings(self) -> Settings:
        """One learning rate over the run, which rises at its start and falls in the last phase."""
        c = self.config
        # Accumulated gradients must be kept until the last micro-batch.
        own = c.settings
        in_backward = c.is_lean(self.name) and own.micro_batch == own.global_batch
        decay = _Decay(c.decay_share, own.final_lr_fraction)
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
        """Choose how to compute experts: as the recipe says, or the fastest way on this machine."""
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
        cast(LanguageModel, m).compute_experts_by(cast(ExpertProducts, products))
        return {_PRODUCTS: products}

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Grow from the previous phase, and check on held-out text that nothing has changed."""
        c, (total, active) = self.config, parameter_counts(self.architecture)
        facts = {"parameters": total, "active_parameters": active}
        _log.info(
            f"[{self.name}] {total:,} parameters, of which {active:,} compute a token; learning "
            f"rate {c.learning_rate:g}; on {i.device}"
        )
        # The first phase opens it too, so a split that is too short is reported before any step.
        windows = token_samples(i.dataset, "validation", c.context)
        if i.prior is None or i.is_given_weights:  # no previous phase to grow from
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
        """Return AdamW; in a wider model, divided weights have a learning rate divided as much."""
        c = self.config
        groups = scaled_groups(
            m.named_parameters(),
            growth_layout(is_tied=c.is_tied),
            c.factors if self.name == "grown" else {},
            lr=c.learning_rate,
            weight_decay=c.weight_decay,
            decays=_has_weight_decay,
        )
        kind = _RewarmingBFloat16AdamW if c.is_lean(self.name) else RewarmingAdamW
        # None, because False would also rule out torch's foreach.
        return kind(groups, betas=_BETAS, fused=c.fused_optimizer or None)

    def sharded_modules(self, m: nn.Module) -> Sequence[nn.Module]:
        """Return the decoder's blocks."""
        return list(cast(LanguageModel, m).blocks)

    def formats(self) -> Mapping[str, Writer]:
        """Return the writer of a Hugging Face folder."""
        return {"huggingface": partial(write_hugging_face, context=self.config.context)}

    def refusals(self, meta: Mapping[str, Any]) -> Sequence[str]:
        """Refuse another vocabulary, and splits too short for a window, or train for a step."""
        c, splits = self.config, meta.get("splits", {})
        too_short = length_refusals(splits, c.context)
        if "train" in splits and not too_short:
            num_windows = (splits["train"]["tokens"] - 1) // c.context
            too_short = [why] if (why := self.settings.why_no_step(num_windows)) else []
        return [*vocabulary_refusals(meta, c.vocab_size), *too_short]

    def samples(self, i: Inputs, split: str) -> Samples:
        c = self.config
        # A finished run may be evaluated on other text.
        if refused := vocabulary_refusals(i.dataset.meta, c.vocab_size):
            raise UserError(refused[0])
        most = c.eval_windows if split == "validation" else None
        steps = sum(getattr(c, f"{name}_steps") for name in _PHASES[: _PHASES.index(self.name)])
        skipped = steps * c.settings.global_batch
        return token_samples(i.dataset, split, c.context, most=most, skipped=skipped)

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
        """Return the loss with equal numbers of tokens per expert, independent of the data."""
        cast(LanguageModel, m).compute_experts_by("balanced")
        return self.loss(m, b, 0, 1)

    def example(self, size: int) -> Batch:
        """Return a batch of one repeated token, for its shapes."""
        return {"tokens": torch.zeros(size, self.config.context + 1, dtype=torch.long)}


def _say_verified(
    phase: str, scaling: str, differences: Mapping[str, float], failures: Sequence[str]
) -> None:
    """Log the transition: what grew, the differences, and the verdict."""
    _log.info(f"[{phase}] scaling: {scaling}")
    found = ", ".join(
        f"{name.replace('_', ' ')} {value:.3g}"
        for name, value in differences.items()
        if name.endswith("_difference")
    )
    verdict = "FAILED" if failures else "PASSED: the same function, and it learns the same"
    _log.info(f"[{phase}] verification: {found}: {verdict}")


@dataclass(frozen=True, slots=True)
class _Decay:
    """A schedule: constant, then linearly down to `final` over the last `share` of the steps."""

    share: float
    final: float

    def __call__(self, step: int, num_steps: int) -> float:
        """Return the factor of a step."""
        left = (num_steps - step) / max(1.0, self.share * num_steps)
        return self.final + (1.0 - self.final) * min(1.0, left)


RECIPES: Mapping[str, Callable[[], GrowthConfig]] = MappingProxyType(
    {"laptop": laptop, "full": full, "literal": literal}
)
# Windows of 128 tokens of 12,000 generated stories; of 256 tokens of TinyStories, whose 2.1 million
# stories are about 470 million GPT-2 tokens. For validation, the number that is evaluated.
_TINY_STORIES = {"train": 1_800_000, "validation": 512}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Growth(Workload[GrowthConfig]):
    """The workload that the registry imports; its stages are defined in the other files here."""

    name: str = "growth"
    data_options: TextOptions = field(default_factory=TextOptions)
    recipes = RECIPES
    nominal_samples = MappingProxyType(
        {
            "laptop": {"train": 8_600, "validation": 128},
            "full": _TINY_STORIES,
            "literal": _TINY_STORIES,
        }
    )

    def stages(self, c: GrowthConfig) -> Sequence[TrainPhase]:
        return [TrainPhase(config=c, name=name) for name in _PHASES]

    def fitted(self, c: GrowthConfig, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """Use the dataset's vocabulary if the recipe's is too small, or far too large."""
        if vocabulary_refusals(meta, c.vocab_size):
            return {"vocab_size": str(meta["vocab_size"])}
        return {}

    def rungs(self, c: GrowthConfig) -> Sequence[Rung]:
        """Return rungs in order: optimizer state, activations, micro-batch, precision."""
        rungs = []
        if c.lean_optimizer != "all":
            rungs.append(rung("optimizer with moments in bfloat16", lean_optimizer="all"))
        if c.recompute != "all":
            rungs.append(rung("activations recomputed", recompute="all"))
        return [*rungs, *micro_batch_rungs(c), *autocast_rungs(c)]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress, options=self.data_options)

    def import_dataset(
        self, files: Sequence[SourceFile], out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return import_dataset(files, out, seed, progress, options=self.data_options)


GROWTH = _Growth()
