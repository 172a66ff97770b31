"""What a model has learned, for people: how it goes on with the beginnings of held-out texts."""

from pathlib import Path

import torch

from training.workload import Inputs
from training.workloads.growth.config import GrowthConfig
from training.workloads.growth.model import LanguageModel
from training.workloads.growth.sampling import generate
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
