"""What a model has learned, for people: how it goes on with the beginnings of held-out texts.

Without a cache of keys and values: a few samples at the end of a phase do not pay for one.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.workload import Inputs
from training.workloads.growth.config import GrowthConfig
from training.workloads.growth.model import LanguageModel
from training.workloads.growth.text.tokens import document_beginnings, open_tokens, open_vocabulary

TEMPERATURE = 0.7
TOP_K = 20


def write(model: LanguageModel, i: Inputs, c: GrowthConfig, path: Path) -> None:
    """Write the samples: each beginning, then in the next line what the model makes of it."""
    tokens = open_tokens(i.dataset, "validation")
    beginnings = document_beginnings(tokens, c.num_shown, c.prompt_tokens)
    if not beginnings:
        path.write_text(f"No held-out text is longer than {c.prompt_tokens} tokens.\n")
        return
    prompts_BT = torch.stack(beginnings).to(i.device)
    texts_BT = generate(
        model,
        prompts_BT,
        c.sample_tokens,
        context=c.context,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        generator=torch.Generator(i.device).manual_seed(i.seed),
    )
    vocabulary = open_vocabulary(i.dataset)
    parts = []
    for ids in texts_BT.tolist():
        made = ids[c.prompt_tokens :]
        # A new text after the end is another one.
        end = made.index(tokens.end_of_text) if tokens.end_of_text in made else len(made)
        begun = vocabulary.text(ids[: c.prompt_tokens])
        parts.append(f"**{begun}**{vocabulary.text(made[:end])}\n")
    path.write_text("\n".join(parts), encoding="utf-8")


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt_BT: Tensor,
    num_tokens: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The prompts followed by `num_tokens` tokens each; the model sees the last `context` of them.

    A temperature of 0 takes the likeliest token. `generator` is one of the prompt's device; the
    same seed gives the same text.
    """
    if temperature < 0 or context < 1 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"temperature {temperature}, context {context}, top_k {top_k}: give a temperature "
            "from 0 on, a context and a top_k from 1 on"
        )
    tokens_BT = prompt_BT
    for _ in range(num_tokens):
        last_BD = model.hidden(tokens_BT[:, -context:]).y_BTD[:, -1]
        logits_BV = F.linear(last_BD, model.output_weight_VD).float()
        tokens_BT = torch.cat([tokens_BT, _drawn(logits_BV, temperature, top_k, generator)], dim=1)
    return tokens_BT


def _drawn(
    logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token each: (B, 1)."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    likeliest, tokens_BK = logits_BV.topk(min(top_k or logits_BV.shape[1], logits_BV.shape[1]))
    shares_BK = (likeliest / temperature).softmax(dim=-1)
    return tokens_BK.gather(1, torch.multinomial(shares_BK, 1, generator=generator))
