"""One result, whatever the number of ranks, and whatever it was before an interruption."""

from collections.abc import Callable

import pytest

from tests.training.hooks import at_rank, notice
from tests.training.runs import AVERAGED, Run, assert_equal

# Eight micro-batches a step, of which the last step of an epoch has six.
SMALL_BATCHES = "--override=micro_batch=1"
# BatchNorm needs two samples: four micro-batches a step.
PAIRS = "--override=micro_batch=2"


@pytest.fixture(scope="module")
def alone(finished: Callable[..., Run]) -> Run:
    """What one rank makes of it, with BatchNorm and a moving average."""
    return finished(PAIRS, *AVERAGED, "--override=ema_buffers=true")


def of_alone(run: Run) -> Run:
    run.options = [PAIRS, *AVERAGED, "--override=ema_buffers=true"]
    return run


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_gives_the_bits_of_one(run: Run, alone: Run, ranks: int) -> None:
    assert of_alone(run).attempt_with_ranks(ranks) == [0] * ranks
    assert_equal(run, alone)


@pytest.mark.parametrize(
    "more",
    [
        ["--override=double=false"],
        pytest.param(["--override=precision=bfloat16"], marks=pytest.mark.slow),
        pytest.param(["--override=precision=float16"], marks=pytest.mark.slow),
    ],
)
def test_eight_ranks_give_the_bits_of_one(
    run: Run, finished: Callable[..., Run], more: list[str]
) -> None:
    options = [SMALL_BATCHES, "--override=batch_norm=false", *more]
    run.options = options
    assert run.attempt_with_ranks(8) == [0] * 8
    assert_equal(run, finished(*options))


def test_a_run_goes_on_with_another_number_of_ranks_and_back(run: Run, alone: Run) -> None:
    of_alone(run)
    for ranks, place in ((4, ("first", 2)), (1, ("first", 7)), (2, ("second", 5))):
        at_rank(0, place, notice)
        assert set(run.attempt_with_ranks(ranks)) == {75}
    assert run.attempt_with_ranks(4) == [0] * 4
    assert_equal(run, alone)
    assert run.json("receipt.json")["numerics_changed"] == []
