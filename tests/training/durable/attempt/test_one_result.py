"""One result, whatever the number of ranks, and whatever it was before an interruption."""

from collections.abc import Callable

import pytest

from tests.training.hooks import at_rank, notice
from tests.training.runs import AVERAGED, Run, assert_equal

# Eight micro-batches a step, of which the last step of an epoch has six.
SMALL_BATCHES = "--override=micro_batch=1"
# BatchNorm needs two samples: four micro-batches a step; and a moving average.
OPTIONS = ["--override=micro_batch=2", *AVERAGED, "--override=ema_buffers=true"]


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
    run.options = [SMALL_BATCHES, "--override=batch_norm=false", *more]
    assert run.attempt_with_ranks(8) == [0] * 8
    assert_equal(run, finished(*run.options))


def test_a_run_goes_on_with_another_number_of_ranks_and_back(
    run: Run, finished: Callable[..., Run]
) -> None:
    run.options = OPTIONS
    for ranks, place in ((4, ("first", 2)), (1, ("first", 7)), (2, ("second", 5))):
        at_rank(0, place, notice)
        assert set(run.attempt_with_ranks(ranks)) == {75}
    assert run.attempt_with_ranks(4) == [0] * 4
    assert_equal(run, finished(*OPTIONS))
