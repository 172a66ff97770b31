"""Generated text: the same for a seed, the likeliest at temperature 0, within the context."""

from typing import Any

import torch

from tests.training.workloads.growth.models import small_model, texts
from training.workloads.growth.evaluation import generate

CONTEXT = 6


def written(seed: int = 0, **more: Any) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    prompt, _ = texts(num_texts=2, num_tokens=3)
    return generate(small_model(), prompt, 8, context=CONTEXT, generator=rng, **more)


def test_a_seed_decides_the_text() -> None:
    assert torch.equal(written(), written())
    assert not torch.equal(written(), written(seed=1))
    assert torch.equal(written()[:, :3], texts(num_texts=2, num_tokens=3)[0])


def test_temperature_0_and_top_1_take_the_likeliest_token() -> None:
    tokens = written(temperature=0.0)
    assert torch.equal(tokens, written(top_k=1))
    model = small_model()
    for place in range(3, 11):
        logits = model(tokens[:, max(0, place - CONTEXT) : place])[:, -1]
        assert torch.equal(tokens[:, place], logits.argmax(dim=-1))


def test_top_k_draws_from_the_k_likeliest_alone() -> None:
    model, (prompt, _) = small_model(), texts(num_texts=1, num_tokens=3)
    likeliest = model(prompt)[0, -1].topk(3).indices
    rng = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"context": CONTEXT, "top_k": 3, "temperature": 9.0}
    drawn = [generate(model, prompt, 1, generator=rng, **options)[0, -1] for _ in range(30)]
    assert set(map(int, drawn)) == set(likeliest.tolist())
