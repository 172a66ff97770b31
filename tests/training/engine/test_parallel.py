"""A model on several ranks: what cannot be sharded is refused in a sentence, on every rank."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.training.attempt.processes import CPU, on_ranks
from tests.training.tiny import TinyTrain, tiny_config
from training.attempt.world import RankEnvironment, World
from training.engine.parallel import is_sharded, parallel
from training.errors import UserError
from training.workload import Loss, Settings, Train

STAGE = TinyTrain(config=tiny_config(sharding="full"), name="first", width=4)


class Blocks(Train):
    """The stage, with the given blocks of its model."""

    def __init__(self, choose: Callable[[Any], Sequence[nn.Module]]) -> None:
        self._choose = choose

    name, settings = STAGE.name, STAGE.settings

    def sharded_modules(self, m: nn.Module) -> Sequence[nn.Module]:
        return self._choose(m)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


def refuse(model: nn.Module, choose: Callable[[Any], Sequence[nn.Module]], words: str) -> Any:
    def act(world: World, root: Path) -> None:
        with pytest.raises(UserError, match=words):
            parallel(Blocks(choose), model, world)

    return act


def test_fails_where_a_block_is_no_part_of_the_model(tmp_path: Path) -> None:
    words = "`sharded_modules` gave a Linear that is not part of its model"
    on_ranks(2, tmp_path, refuse(Tied(), lambda m: [nn.Linear(4, 4)], words))


def test_fails_where_blocks_would_tear_a_shared_parameter_apart(tmp_path: Path) -> None:
    words = "sharding would split a parameter that several modules share"
    on_ranks(2, tmp_path, refuse(Tied(), lambda m: [m.first], words))


def test_fails_for_a_parameter_without_a_dimension(tmp_path: Path) -> None:
    words = "stage 'first': its model cannot be sharded: .*scalar"
    on_ranks(2, tmp_path, refuse(Scaled(), lambda m: [], words))


def test_fails_for_settings_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="sharding is 'half'; give one of none, full"):
        Settings(epochs=1, global_batch=1, micro_batch=1, sharding=cast(Any, "half"))
    with pytest.raises(ValueError, match="let every parameter take part in every step"):
        Settings(
            epochs=1, global_batch=1, micro_batch=1, sharding="full", find_unused_parameters=True
        )


class Layers(nn.Module):
    """Five MB of weights, used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for number in (3, 0, 4, 1, 2):
            x = torch.relu(self.layers[number](x))
        return x


class SumOfLayers:
    """A stage whose loss is the sum of the outputs."""

    def __init__(self) -> None:
        self.name, self.settings = "first", Settings(epochs=1, global_batch=4, micro_batch=1)

    def loss(self, m: nn.Module, b: Tensor, step: int, num_steps: int) -> Loss:
        return Loss(total=m(b).sum())


@pytest.mark.parametrize("size", [3, 4])
def test_the_first_backward_of_an_attempt_adds_up_as_every_later_one(
    size: int, tmp_path: Path
) -> None:
    """A resume begins with one: with other buckets, three ranks would round other sums."""

    def act(world: World, root: Path) -> None:
        torch.manual_seed(0)
        work = parallel(cast(Train, SumOfLayers()), model := Layers(), world)
        batch = torch.randn(4, 512, generator=torch.Generator().manual_seed(world.rank))
        gradients = []
        for step in range(3):
            model.zero_grad(set_to_none=True)
            work.losses(batch, step, 3)[0].backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for later in gradients[1:]:
            assert all(map(torch.equal, gradients[0], later))

    on_ranks(size, tmp_path, act)


def test_one_process_alone_shards_nothing() -> None:
    assert not is_sharded(STAGE.settings, 1)
    assert is_sharded(STAGE.settings, 2)
    model = nn.Sequential(nn.Linear(6, 2))
    work = parallel(STAGE, model, World(RankEnvironment(), CPU))
    assert work.use(lambda own: own(torch.zeros(3, 6))).shape == (3, 2)
    assert type(model) is nn.Sequential
    assert type(next(model.parameters())) is nn.Parameter
