"""Generated text: the same for a seed, of the likeliest tokens, within the context."""

import torch

from tests.training.workloads.growth.models import small_model, texts
from training.workloads.growth.growth_workload import _TOP_K, _generate

CONTEXT = 6


def written(seed: int = 0) -> torch.Tensor:
    prompt, _ = texts(num_texts=2, num_tokens=3)
    return _generate(small_model(), prompt, 8, context=CONTEXT, temperature=0.7, seed=seed)


def test_a_seed_decides_the_text() -> None:
    assert torch.equal(written(), written())
    assert not torch.equal(written(), written(seed=1))
    assert torch.equal(written()[:, :3], texts(num_texts=2, num_tokens=3)[0])


def test_each_token_is_one_of_the_likeliest_after_those_within_the_context() -> None:
    model, tokens = small_model(), written()
    for place in range(3, 11):
        logits = model(tokens[:, max(0, place - CONTEXT) : place])[:, -1]
        likeliest = logits.topk(_TOP_K).indices
        assert (tokens[:, place, None] == likeliest).any(dim=1).all()
