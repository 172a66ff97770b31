"""The state of a stage: its steps, also those that weigh nothing, and what it starts from."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from contract.errors import UserError
from tests.training.durable.attempt.processes import CPU
from tests.training.forked import in_fork
from tests.training.tiny import TinyTrain, tiny_config
from training.durable.attempt.world import RankEnvironment, World
from training.durable.save.tensors.resume import CheckpointContent
from training.engine.batches import MicroBatch
from training.engine.job import TrainProxy
from training.engine.learner import Learner
from training.preflight.standalone import standalone_inputs
from training.settings import changed
from training.workload import Batch, Inputs, Loss, Prior, PriorTensors, Start, Train

CONFIG = tiny_config(dropout=0.0, batch_norm=False, clip_norm=None, schedule="constant")


class Boxes(TrainProxy):
    """Its total never vanishes: a detector's without boxes is that of the background."""

    def model(self, i: Inputs) -> nn.Module:
        return nn.Linear(2, 1, bias=False)

    def optimizer(self, m: nn.Module) -> Optimizer:
        return SGD(m.parameters(), lr=1.0, momentum=0.5, weight_decay=0.25)

    def weight(self, b: Batch) -> float:
        return float(len(b["boxes"]))

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        total = m(torch.ones(1, 2)).sum() + 7.0
        mean = m(torch.tensor([[0.0, 3.0]])).sum() if b["has_mean"] else None
        return Loss(total=total, mean=mean)


STAGE: Train = Boxes(TinyTrain(config=CONFIG, name="boxes", width=2))


def stepped(learner: Learner, batch: Mapping[str, Any], step: int) -> float:
    loss, _, _ = learner.step(
        [(MicroBatch(number=0, epoch=0, ids=(0,)), batch)],
        weight=STAGE.weight(batch),
        num_micro_batches=1,
        step=step,
        num_steps=2,
        lr_factor=(0.5, 1.0)[step],  # as in a warmup
        own_time=contextlib.nullcontext(),
    ).read()
    return loss


@pytest.fixture
def learner() -> Learner:
    world = World(RankEnvironment(), CPU)
    return Learner(STAGE, standalone_inputs("boxes", CONFIG), world, None, {})


def weights(learner: Learner) -> Tensor:
    return next(learner.model.parameters()).detach().clone()


@pytest.mark.parametrize("has_mean", [False, True])
def test_the_loss_of_a_step_that_weighs_nothing_is_not_divided(
    learner: Learner, has_mean: bool
) -> None:
    before = weights(learner)
    loss = stepped(learner, {"boxes": [], "has_mean": has_mean}, 0)
    mean = 3.0 * float(before[0, 1]) if has_mean else 0.0
    assert loss == pytest.approx(float(before.sum()) + 7.0 + mean)
    gradient = next(learner.model.parameters()).grad
    assert gradient is not None
    assert gradient.tolist() == [[1.0, 4.0 if has_mean else 1.0]]


def test_fails_on_a_checkpoint_of_another_model_and_says_what_does_not_fit() -> None:
    tensors = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}
    checkpoint = CheckpointContent(tensors={"model": tensors}, state={})
    named = "'boxes': bias is unknown; weight is 1x3 there and 1x2 here; resume the run with the"
    with pytest.raises(UserError, match=named):
        world = World(RankEnvironment(), CPU)
        Learner(STAGE, standalone_inputs("boxes", CONFIG), world, checkpoint, {})


def test_in_a_step_that_weighs_nothing_the_optimizer_steps_as_usual(learner: Learner) -> None:
    rates = (0.5, 1.0)
    before = weights(learner)
    stepped(learner, {"boxes": [1, 2], "has_mean": False}, 0)
    momentum = torch.full((1, 2), 0.5) + 0.25 * before
    middle = before - rates[0] * momentum
    assert torch.allclose(weights(learner), middle)
    stepped(learner, {"boxes": [], "has_mean": False}, 1)
    momentum = 0.5 * momentum + 1.0 + 0.25 * middle
    assert torch.allclose(weights(learner), middle - rates[1] * momentum)


def test_the_stage_before_is_there_until_the_start_and_to_read_it_later_is_refused() -> None:
    read: list[Tensor] = []

    class Starting(Boxes):
        def start(self, m: nn.Module, i: Inputs) -> Start:
            assert i.prior is not None
            read.extend(dict(i.prior.model).values())
            return Start()

    tensors = PriorTensors({"weight": torch.ones(3)})
    prior = Prior(stage="before", step=4, model=tensors, metrics={}, optimizer=dict)
    inputs = replace(standalone_inputs("boxes", CONFIG), prior=prior)
    stage = Starting(TinyTrain(config=CONFIG, name="boxes", width=2))
    Learner(stage, inputs, World(RankEnvironment(), CPU), None, {})
    assert [tensor.tolist() for tensor in read] == [[1.0, 1.0, 1.0]]
    with pytest.raises(UserError, match="reads the tensors of `prior` after its start"):
        prior.model["weight"]


def test_each_size_of_a_batch_is_compiled_for_itself_the_ninth_too() -> None:
    """After an interruption others come first: no size may run by what came before it."""
    sizes = list(range(1, 12))
    assert in_fork(lambda: compiled_shapes(sizes)) == [(size, 2) for size in sizes]


def compiled_shapes(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes for which code is made, by a backend that only takes note of them."""
    shapes: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        shapes.extend(tuple(tensor.shape) for tensor in inputs if not tensor.requires_grad)
        return graph.forward

    compiled = torch.compile

    def compile_noting(call: Callable[..., Any], *, mode: str, dynamic: bool) -> Any:
        return compiled(call, backend=backend, dynamic=dynamic)

    config = changed(CONFIG, compile_mode="default")
    stage = Boxes(TinyTrain(config=config, name="boxes", width=2))
    world = World(RankEnvironment(), CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_noting)
        learner = Learner(stage, standalone_inputs("boxes", config), world, None, {})
    for size in sizes:
        learner.model(torch.ones(size, 2))
    return shapes
