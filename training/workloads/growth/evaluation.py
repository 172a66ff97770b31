"""Evaluation on held-out text: a model's perplexity, and how evenly its experts share the text.

For people, also how the model continues held-out texts: without a cache of keys and values, which
would not pay off for a few samples at the end of a phase.

B batch, T tokens, N = B x T, E experts, K experts of a token, L blocks with experts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import Batch, Inputs, Partial, Train, write_table
from training.workloads.growth.config import GrowthConfig
from training.workloads.growth.experts import ExpertFeedForward
from training.workloads.growth.model import LanguageModel
from training.workloads.growth.text.tokens import TOKENIZER_FILE, open_tokens
from training.workloads.growth.text.vocabulary import read_vocabulary

_TEMPERATURE = 0.7
_TOP_K = 20


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
            generator=torch.Generator(i.device).manual_seed(i.seed),
        )
        vocabulary = read_vocabulary(i.dataset.file(TOKENIZER_FILE))
        texts = []
        for ids in texts_BT.tolist():
            made = ids[c.prompt_tokens :]
            # Cut at the end of the text: what follows is a new one.
            end = made.index(tokens.end_of_text) if tokens.end_of_text in made else len(made)
            begun = vocabulary.text(ids[: c.prompt_tokens])
            texts.append(f"**{begun}**{vocabulary.text(made[:end])}\n")
        path.write_text("\n".join(texts), encoding="utf-8")


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
    generator: torch.Generator,
) -> Tensor:
    """Continue each prompt by `num_tokens` tokens; the model sees the last `context` of them.

    `generator` is on the prompt's device; the same seed gives the same text.
    """
    tokens_BT = prompt_BT
    for _ in range(num_tokens):
        last_BD = model.hidden(tokens_BT[:, -context:]).y_BTD[:, -1]
        logits_BV = F.linear(last_BD, model.output_weight_VD).float()
        likeliest, tokens_BK = logits_BV.topk(min(_TOP_K, logits_BV.shape[1]))
        shares_BK = (likeliest / _TEMPERATURE).softmax(dim=-1)
        drawn_B1 = tokens_BK.gather(1, torch.multinomial(shares_BK, 1, generator=generator))
        tokens_BT = torch.cat([tokens_BT, drawn_B1], dim=1)
    return tokens_BT
