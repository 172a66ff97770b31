"""Text that a model writes: token after token, each drawn from the likeliest ones.

Without a cache of keys and values: a few samples at the end of a phase do not pay for one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.workloads.growth.model import LanguageModel


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
