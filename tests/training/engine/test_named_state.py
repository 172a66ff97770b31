"""An optimizer's state has its parameters' names, and another optimizer starts from it."""

import json
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from contract.errors import UserError
from tests.training.tiny import TinyConfig, TinyTrain
from training.durable.save.tensors.resume import CheckpointContent
from training.engine.optimizer import (
    OPTIMIZER_NAMES,
    flatten_state,
    parameter_names,
    start_state,
    state_by_name,
)
from training.workload import OptimizerState

STAGE = TinyTrain(config=TinyConfig(), name="grown", width=4)


class Tied(nn.Module):
    """An embedding that is the head too, one layer, and one that no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.layer(self.embedding(ids))))


def in_groups(model: Tied) -> list[dict[str, Any]]:
    """Not in the model's order: biases first, then the rest."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    biases = [p for n, p in trained if n.endswith("bias")]
    others = [p for n, p in trained if not n.endswith("bias")]
    return [{"params": biases, "weight_decay": 0.0}, {"params": others}]


def trained(model: Tied) -> Optimizer:
    optimizer = AdamW(in_groups(model), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
    return optimizer


def read_back(optimizer: Optimizer, model: nn.Module) -> OptimizerState:
    """As from a checkpoint: through JSON, the tensors apart."""
    tensors: dict[str, Tensor] = {}
    skeleton = flatten_state(optimizer.state_dict(), tensors)
    state = {"optimizer": skeleton, OPTIMIZER_NAMES: parameter_names(optimizer, model)}
    return state_by_name(
        CheckpointContent(tensors={"optimizer": tensors}, state=json.loads(json.dumps(state)))
    )


def test_every_parameter_s_state_is_under_its_names() -> None:
    model = Tied()
    optimizer = trained(model)
    found = read_back(optimizer, model)
    # Neither what has no gradient nor what is not trained has a state.
    names = {"embedding.weight", "head.weight", "layer.weight", "layer.bias"}
    assert found.keys() == names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for key, value in found.get(name, {}).items():
            assert torch.equal(value, optimizer.state[parameter][key]), (name, key)


def test_an_optimizer_goes_on_from_the_state_as_if_it_were_its_own() -> None:
    torch.manual_seed(0)
    first, second = Tied(), Tied()
    optimizer = trained(first)
    second.load_state_dict(first.state_dict())
    # Other groups, in another order: names are what counts.
    other = AdamW([p for p in second.parameters() if p.requires_grad], lr=0.1, weight_decay=0.01)
    start_state(STAGE, other, second, read_back(optimizer, first))
    optimizer.param_groups[0]["weight_decay"] = 0.01
    for model, its in ((first, optimizer), (second, other)):
        its.zero_grad()
        model(torch.arange(5)).square().sum().backward()
        its.step()
    for name, tensor in second.state_dict().items():
        assert torch.equal(tensor, first.state_dict()[name]), name


def test_parameters_that_are_given_one_tensor_have_each_their_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    one = torch.ones(2, 2)
    given = {name: {"momentum_buffer": one} for name in ("0.weight", "1.weight")}
    start_state(STAGE, optimizer, model, given)
    first, second = (state["momentum_buffer"] for state in optimizer.state.values())
    first.zero_()
    assert torch.equal(second, one) and torch.equal(one, torch.ones(2, 2))


def test_fails_for_a_name_that_the_optimizer_does_not_have() -> None:
    model = Tied()
    with pytest.raises(UserError, match=r"stage 'grown': start returned .* 'frozen.weight', which"):
        start_state(STAGE, AdamW(in_groups(model)), model, {"frozen.weight": {}})
