"""A model that grows twice, interrupted in each stage: its optimizers start from one another's."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.training import growing, tiny
from tests.training.hooks import interrupt_at
from tests.training.runs import Run, assert_equal
from training.cli.main import main
from training.engine.optimizer_state import state_by_name
from training.save.read import read_checkpoint
from training.workload import OptimizerState

WORKLOAD = "--workload=tests.training.growing:GROWTH"
STAGES = ("dense", "experts", "wide")


def new_run(folder: Path, dataset: Path) -> Run:
    return Run(
        dataset=dataset,
        uri=str(folder / "run"),
        scratch=folder / "scratch",
        options=[WORKLOAD, "--recipe=tiny", "--keep=50"],
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "growth"
    assert main(["data", "make", WORKLOAD, f"--out={out}", "--count=30"]) == 0
    return out


@pytest.fixture(scope="module")
def grown(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Uninterrupted; what its stages read of the state before is gone at their first steps."""
    run = new_run(tmp_path_factory.mktemp("grown"), tokens)
    growing.READ.clear()
    alive: list[int] = []
    for stage in STAGES[1:]:
        tiny.HOOKS[stage] = lambda step: alive.append(
            sum(ref() is not None for ref in growing.READ)
        )
    assert run.attempt() == 0
    tiny.HOOKS.clear()
    assert len(growing.READ) == 10 + 24 and not any(alive)
    return run


def state_at_the_end(run: Run, stage: str) -> OptimizerState:
    end = next(e for e in run.head.checkpoints if (e.stage, e.kind) == (stage, "stage-end"))
    return state_by_name(read_checkpoint(run.store, end))


def test_a_model_that_is_interrupted_in_each_stage_grows_to_the_same(
    grown: Run, tokens: Path, tmp_path: Path
) -> None:
    run = new_run(tmp_path, tokens)
    for stage in STAGES:
        interrupt_at(stage, 1)
        assert run.attempt() == 75
        tiny.HOOKS[stage] = lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 4 else None
        killed = run.fork()
        killed.join(60)
        assert killed.exitcode == -signal.SIGKILL
        tiny.HOOKS.clear()
    assert run.attempt() == 0
    assert_equal(run, grown)


def test_a_grown_model_computes_what_the_smaller_one_did() -> None:
    dense, experts = (growing.Model(8, has_experts=has) for has in (False, True))
    wide = growing.Model(16, has_experts=True)
    experts.load_state_dict(growing.upcycled(dense.state_dict()), strict=False)
    wide.load_state_dict(growing.widened_model(experts.state_dict()))
    ids = torch.arange(12).view(2, 6)
    for model in (experts, wide):
        assert torch.allclose(model(ids), dense(ids), atol=1e-6)


def test_the_optimizer_counts_on_where_the_one_before_has_ended(grown: Run) -> None:
    for number, stage in enumerate(STAGES, 1):
        state = state_at_the_end(grown, stage)
        assert int(state["embedding.weight"]["step"]) == number * growing.STEPS
        assert torch.equal(state["head.weight"]["exp_avg"], state["embedding.weight"]["exp_avg"])
        if stage != "dense":  # the router is as old as the experts
            assert int(state["block.router.weight"]["step"]) == (number - 1) * growing.STEPS


@pytest.mark.slow
def test_fails_for_an_optimizer_state_of_a_model_that_ranks_share(
    tokens: Path, tmp_path: Path
) -> None:
    """They read it whole from what each wrote a share of; to start from it is refused."""
    run = new_run(tmp_path, tokens)
    assert run.attempt_with_ranks(2, "--override=sharding=full") == [2, 2]
    assert state_at_the_end(run, "dense")["block.0.weight"]["exp_avg"].shape == (16, 8)
    assert len(run.losses()) == growing.STEPS
