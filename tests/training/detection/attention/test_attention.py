"""Every implementation of deformable attention computes its definition, and its gradients."""

import pytest
import torch
from torch import Tensor

from tests.training.detection.attention.scalar import scalar_attention
from training.detection.attention import Implementation, deformable_attention

SHAPES = [(6, 4), (3, 2)]
EVERYWHERE: list[Implementation] = ["reference", "deterministic"]


def case(
    *, batch: int = 1, heads: int = 2, width: int = 2, queries: int = 2, points: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Upstream's test (ops/test.py): value, locations and weights in float64, seed 3."""
    rng = torch.Generator().manual_seed(3)
    tokens, levels = sum(h * w for h, w in SHAPES), len(SHAPES)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    value = uniform(batch, tokens, heads, width) * 0.01
    locations = uniform(batch, queries, heads, levels, points, 2)
    weights = uniform(batch, queries, heads, levels, points) + 1e-5
    return value, locations, weights / weights.sum(dim=(-1, -2), keepdim=True)


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_it_is_the_definition_inside_at_the_border_and_outside(
    implementation: Implementation,
) -> None:
    value, locations, weights = case(batch=2, queries=5, width=3, points=3)
    # Borders, corners, pixel centres, just outside and far away.
    special = [(0, 0), (1, 1), (0, 0.5), (1, 0.25), (-0.1, 0.5), (1.1, 1.1), (-3, 2), (0.125, 0.75)]
    flat = locations.view(-1, 2)
    flat[: 2 * len(special) : 2] = torch.tensor(special, dtype=torch.float64)
    found = deformable_attention(value, SHAPES, locations, weights, implementation)
    expected = scalar_attention(value, SHAPES, locations, weights)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_its_gradients_are_those_of_small_differences(implementation: Implementation) -> None:
    given = tuple(each.requires_grad_() for each in case())

    def attend(*inputs: Tensor) -> Tensor:
        value, locations, weights = inputs
        return deformable_attention(value, SHAPES, locations, weights, implementation)

    assert torch.autograd.gradcheck(attend, given)
