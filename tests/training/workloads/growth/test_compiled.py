"""With compile_mode the decoder's blocks are compiled: once for all alike, whatever the text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.forked import in_fork
from tests.training.workloads.growth.models import small_config, small_model, texts
from training.engine.learner import compile_blocks
from training.workloads.growth.config import Block, DenseBlock, ExpertBlock, laptop
from training.workloads.growth.growth_workload import GROWTH

DENSE, EXPERTS = DenseBlock(hidden=24), ExpertBlock(hidden=24, num_experts=4)


# Dynamo looks at the gradient of what a block is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("blocks", "graphs"),
    [
        # A block with experts is compiled up to them, and from them on.
        ((DENSE,) * 3, 1),
        ((EXPERTS,) * 3, 2),
        ((EXPERTS, DENSE, EXPERTS), 3),
    ],
    ids=["dense", "experts", "grown"],
)
def test_blocks_that_are_alike_share_code_for_every_text_of_a_length(
    blocks: Sequence[Block], graphs: int
) -> None:
    made, differences = in_fork(lambda: _compiled(tuple(blocks)))
    assert made == graphs
    assert max(differences) < 1e-12


def _compiled(blocks: tuple[Block, ...]) -> tuple[int, list[float]]:
    """How many graphs three texts needed, and how far off losses and gradients were at most."""
    made = []

    def backend(graph: torch.fx.GraphModule, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    plain, compiled = (small_model(replace(small_config(), blocks=blocks)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        compile_fully = torch.compile
        patch.setattr(
            torch, "compile", lambda call, *, mode, dynamic: compile_fully(call, backend=backend)
        )
        compile_blocks(GROWTH.stages(laptop())[0], compiled, "default")
    differences = [
        (one - other).abs().max().item()
        for seed in range(3)
        for one, other in zip(_learned(plain, seed), _learned(compiled, seed), strict=True)
    ]
    return len(made), differences


def _learned(model: nn.Module, seed: int) -> list[Tensor]:
    loss = model.loss(*texts(seed=seed))  # type: ignore[operator]
    return [loss.total, *torch.autograd.grad(loss.total + loss.balance, list(model.parameters()))]


def test_no_number_of_sizes_makes_torch_run_one_uncompiled() -> None:
    """Which one that were would depend on what this process has met before."""
    from torch._dynamo import config

    compile_blocks(GROWTH.stages(laptop())[0], small_model(small_config()), "default")
    assert min(config.recompile_limit, config.accumulated_recompile_limit) > 10**9
