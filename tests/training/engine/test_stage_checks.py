"""A wrong result of a stage is refused in a sentence with the method and what it should return."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from contract.errors import UserError
from tests.training.tiny import Tiny, TinyTrain, tiny_config
from training.cli.main import main
from training.engine import stage_checks
from training.workload import Loss, Partial, Samples, Start, Train


class Named(Train):
    name = "classify"


class Ordered(Samples):
    """Samples of which only the order matters."""

    def __init__(self, *orders: Any) -> None:
        self._orders = list(orders)

    def __len__(self) -> int:
        return 3

    def order(self, epoch: int, seed: int) -> Sequence[int]:
        order: Sequence[int] = self._orders.pop(0)
        return order


STAGE = Named()
SCALAR = torch.ones((), requires_grad=True)
MODEL = nn.Linear(2, 2)


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()])


class ScheduleFree(torch.optim.SGD):
    """With the methods of schedulefree's optimizers."""

    def eval(self) -> None: ...


LOSS = {
    "loss returned a tensor of shape ()": SCALAR,
    "a tensor of shape (4,) with requires_grad=True; return a differentiable": Loss(
        total=torch.ones(4, requires_grad=True)
    ),
    "with requires_grad=False; return a differentiable scalar": Loss(total=torch.ones(())),
    "loss returned as mean a float; return a scalar": Loss(total=SCALAR, mean=cast(Any, 0.5)),
    "the loss's metric 'a' is a float; return a pair (sum, count)": Loss(
        total=SCALAR, metrics=cast(Any, {"a": 0.5})
    ),
}
TENSOR = {"accuracy": torch.ones(3)}


@pytest.mark.parametrize(
    ("check", "given", "says"),
    [
        *((stage_checks.checked_loss, (loss,), says) for says, loss in LOSS.items()),
        (stage_checks.checked_weight, (SCALAR, 0), "weight returned a tensor of shape ()"),
        (stage_checks.checked_weight, (-1.0, 4), "step 5 have the total weight -1.0"),
        (stage_checks.checked_start, (None,), "start returned None; return training.St"),
        (stage_checks.checked_optimizer, (None, MODEL), "optimizer returned None; return a to"),
        (
            stage_checks.checked_optimizer,
            (ScheduleFree(MODEL.parameters()), MODEL),
            "ScheduleFree keeps the weights to evaluate apart from those it trains",
        ),
        (
            stage_checks.checked_optimizer,
            (sgd(MODEL, nn.Linear(1, 1)), MODEL),
            "wrong parameters (2 of 4 are not the model's); pass it those of the model",
        ),
        (stage_checks.checked_partial, ({},), "evaluate returned a dict; return training.Par"),
        (stage_checks.checked_metrics, (None,), "summarize returned None; return a mapping"),
        (stage_checks.checked_metrics, (TENSOR,), "summarize returned a tensor of shape (3,) with"),
        (stage_checks.checked_metrics, (TENSOR,), "with requires_grad=False as 'accuracy'"),
    ],
)
def test_fails_for_a_wrong_result(check: Any, given: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UserError) as error:
        check(STAGE, *given)
    assert says in str(error.value)
    assert str(error.value).startswith("stage 'classify'")


def test_a_schedule_may_be_made_in_the_recipe() -> None:
    class Scheduled(Tiny):
        recipes = {"quick": lambda: tiny_config(schedule=lambda step, of: 1 - step / of)}  # type: ignore[assignment]  # noqa: RUF012

    assert stage_checks.problems(Scheduled()) == []


class Makes(TinyTrain):
    make = None  # type: ignore[assignment]


def test_a_stage_that_trains_may_have_any_attribute() -> None:
    stage = Makes(config=tiny_config(), name="first", width=2)
    assert not [*stage_checks._stages([stage])]


@pytest.mark.parametrize("batch", [{"text": ["a", "b"]}, []])
def test_fails_for_a_batch_without_a_tensor_to_count(batch: Any) -> None:
    with pytest.raises(UserError, match="'classify': its batches have no tensor to count; add we"):
        STAGE.weight(batch)


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        ([[0, 1, 1]], "does not return each of 3 indices exactly once"),
        ([[0, 1]], "does not return each of 3 indices exactly once"),
        ([[0, 1, 2, 3]], "never change the number of samples"),
        ([[0, 1, -1]], "does not return each of 3 indices exactly once"),
        ([[0, 1, 1.5]], "does not return each of 3 indices exactly once"),
        ([torch.tensor([0, 1, 3])], "does not return each of 3 indices exactly once"),
        ([[0, 1, 2], [0, 2, 1]], "returns another order each time"),
    ],
)
def test_fails_for_an_order_that_loses_samples(orders: Any, says: str) -> None:
    with pytest.raises(UserError) as error:
        stage_checks.checked_order(cast(Samples, Ordered(*orders)), 0, 7, twice=True)
    assert says in str(error.value)


def test_fails_for_one_order_that_is_shuffled_in_place() -> None:
    class Shuffling:
        own = torch.arange(3)

        def __len__(self) -> int:
            return 3

        def order(self, epoch: int, seed: int) -> torch.Tensor:
            self.own[[0, 1]] = self.own[[1, 0]]
            return self.own

    with pytest.raises(UserError, match="returns another order each time"):
        stage_checks.checked_order(cast(Samples, Shuffling()), 0, 7, twice=True)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_an_order_may_be_any_sequence_of_indices(kind: Callable[[list[int]], Any]) -> None:
    samples = cast(Samples, Ordered(kind([2, 0, 1]), kind([2, 0, 1])))
    assert stage_checks.checked_order(samples, 0, 7, twice=True).tolist() == [2, 0, 1]


def test_right_results_are_passed_through() -> None:
    loss, start, partial = Loss(total=SCALAR, metrics={"a": (SCALAR, 2.0)}), Start(), Partial()
    assert stage_checks.checked_loss(STAGE, loss) is loss
    assert stage_checks.checked_start(STAGE, start) is start
    assert stage_checks.checked_partial(STAGE, partial) is partial
    assert stage_checks.checked_weight(STAGE, 3, 0) == 3
    assert stage_checks.checked_weight(STAGE, 0.0, 0) == 0
    assert stage_checks.checked_metrics(STAGE, {"a": torch.tensor(0.5)}) == {"a": 0.5}
    order = torch.tensor([2, 0, 1])
    found = stage_checks.checked_order(cast(Samples, Ordered(order, order)), 0, 7, twice=True)
    assert (found.dtype, found.tolist()) == (np.int64, [2, 0, 1])


def test_fails_for_an_object_that_is_no_workload(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "--recipe=quick", "--dataset-uri=none", "--run-uri=none"]
    assert main([*command, "--workload=tests.training.proof.check.faulty:NOTHING"]) == 2
    assert "cannot be trained: the workload has no stages(c): " in capsys.readouterr().err
