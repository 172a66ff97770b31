"""A model on several ranks: what cannot be sharded is refused in a sentence, on every rank."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from contract.errors import UserError
from tests.training.durable.attempt.processes import CPU, on_ranks
from tests.training.tiny import TinyTrain, tiny_config
from training.durable.attempt.world import RankEnvironment, World
from training.durable.errors import RunFailedError
from training.engine.batches import own_micro_batches
from training.engine.parallel import Parallel, is_sharded, parallel
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


Choose = Callable[[Any], Sequence[nn.Module]]
REFUSED: list[tuple[nn.Module, Choose, str]] = [
    (Tied(), lambda m: [nn.Linear(4, 4)], "returned a Linear that is not part of its model"),
    (Tied(), lambda m: [m.first], "would split a parameter that several modules share"),
    (Scaled(), lambda m: [], "stage 'first': its model cannot be sharded: .*scalar"),
]


def test_fails_for_a_model_that_cannot_be_shared_as_asked(tmp_path: Path) -> None:
    def act(world: World, root: Path) -> None:
        for model, choose, words in REFUSED:
            with pytest.raises(UserError, match=words):
                parallel(Blocks(choose), model, world)

    on_ranks(2, tmp_path, act)


def test_fails_for_settings_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="sharding is 'half'; use one of none, full"):
        Settings(epochs=1, global_batch=1, micro_batch=1, sharding=cast(Any, "half"))
    with pytest.raises(ValueError, match="reduction is 'star'; use one of tree, ring"):
        Settings(epochs=1, global_batch=1, micro_batch=1, reduction=cast(Any, "star"))


class Switched(nn.Module):
    """Uses one of two layers and never the third."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, which: Tensor) -> Tensor:
        return self.layers[int(which)](torch.ones(3))  # type: ignore[no-any-return]


class SumOfOutputs:
    """A stage whose loss is the sum of the outputs."""

    name, settings = "first", Settings(epochs=1, global_batch=4, micro_batch=1)

    def loss(self, m: nn.Module, b: Tensor, step: int, num_steps: int) -> Loss:
        return Loss(total=m(b).sum())


def step(work: Parallel, world: World) -> None:
    """Four micro-batches; the second layer takes part in the last one only."""
    work.begin_step(4)
    for place, number in enumerate(own_micro_batches(4, world.rank, world.size)):
        with work.adding(place):
            work.losses(torch.tensor(number // 3), 0, 1)[0].backward()
    work.end_step()


def test_a_parameter_has_a_gradient_where_any_rank_has_one(tmp_path: Path) -> None:
    def act(world: World, root: Path) -> None:
        work = parallel(cast(Train, SumOfOutputs()), model := Switched(), world)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            step(work, world)
            first, second, third = (layer.weight.grad for layer in model.layers)
            assert first is not None and first.eq(3).all()
            assert second is not None and second.eq(1).all()
            assert third is None, "as on one rank, whose optimizer then leaves it alone"

    for size in (1, 2, 4):
        on_ranks(size, tmp_path, act)


def drawn(m: Switched, b: Tensor) -> None:
    with torch.no_grad():
        m.layers[2].weight.lerp_(m.layers[0].weight, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("act_in_loss", "says"),
    [
        (lambda m, b: m.calls.add_(1), "its forward changes a parameter, or a buffer other"),
        (drawn, "its forward changes a parameter, or a buffer other"),
        (lambda m, b: m.requires_grad_(True), "a parameter that model.. froze was unfrozen, but"),
    ],
)
def test_fails_where_ranks_would_differ(
    tmp_path: Path, act_in_loss: Callable[[Switched, Tensor], None], says: str
) -> None:
    class Acting(SumOfOutputs):
        def loss(self, m: Any, b: Tensor, step: int, num_steps: int) -> Loss:
            act_in_loss(m, b)
            return super().loss(m, b, step, num_steps)

    def act(world: World, root: Path) -> None:
        model = Switched()
        model.layers[0].weight.requires_grad_(False)  # type: ignore[union-attr]
        work = parallel(cast(Train, Acting()), model, world)
        with pytest.raises(RunFailedError, match=f"'first': {says}"):
            step(work, world)

    on_ranks(2, tmp_path, act)


def test_fails_for_statistics_that_ranks_would_exchange_in_forward(tmp_path: Path) -> None:
    def act(world: World, root: Path) -> None:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
        with pytest.raises(UserError, match="'first': SyncBatchNorm would hang"):
            parallel(cast(Train, SumOfOutputs()), model, world)

    on_ranks(2, tmp_path, act)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_step_leaves_the_mean_of_its_micro_batches_statistics(is_frozen: bool) -> None:
    def loss(m: nn.Module, *others: Any) -> Loss:
        if is_frozen:  # in each loss: the step may begin in training, as one does after a resume
            m.eval()
        return SumOfOutputs().loss(m, *others)

    settings = Settings(epochs=1, global_batch=6, micro_batch=2)
    stage = cast(Train, SimpleNamespace(name="first", settings=settings, loss=loss))
    work = parallel(stage, model := nn.BatchNorm1d(1), World(RankEnvironment(), CPU))
    batches = [torch.tensor([[0.0], [2.0 * number]]) for number in range(3)]
    work.begin_step(3)
    for place, batch in enumerate(batches):
        with work.adding(place):
            work.losses(batch, 0, 1)[0].backward()
    work.end_step()
    assert model.running_mean is not None and model.num_batches_tracked is not None
    assert model.running_mean.item() == pytest.approx(0 if is_frozen else 0.1 * (0 + 1 + 2) / 3)
    assert model.num_batches_tracked.item() == (0 if is_frozen else 1)


def test_one_process_alone_shards_nothing() -> None:
    assert not is_sharded(STAGE.settings, 1)
    assert is_sharded(STAGE.settings, 2)
    model = nn.Sequential(nn.Linear(6, 2))
    work = parallel(STAGE, model, World(RankEnvironment(), CPU))
    assert work.use(lambda own: own(torch.zeros(3, 6))).shape == (3, 2)
    assert type(model) is nn.Sequential
    assert type(next(model.parameters())) is nn.Parameter
