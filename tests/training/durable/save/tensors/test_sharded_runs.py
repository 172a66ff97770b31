"""A stage whose model is sharded over ranks keeps the same promises as any other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.fsdp  # noqa: F401  (half a second that each fork would need)

from tests.training import tiny
from tests.training.durable.attempt.machine import LONG, Clock, Machine
from tests.training.hooks import at_rank, both_ranks_stop_at_a_notice, notice
from tests.training.runs import AVERAGED, DOUBLE, SHARDED, Run, assert_close

NewRun = Callable[[str], Run]
IN_BLOCKS = [SHARDED, "--override=blocks=true"]


@pytest.fixture
def run(sharded_run: Run) -> Run:
    return sharded_run


def test_two_ranks_with_a_share_each_train_as_one_process_does(
    sharded: Run, new_run: NewRun, tmp_path: Path
) -> None:
    alone = new_run(str(tmp_path / "alone" / "run-1"))
    alone.options = [SHARDED, *AVERAGED]
    assert alone.attempt() == 0
    assert_close(sharded, alone, 1e-5)
    files = {file.name for entry in sharded.head.checkpoints for file in entry.files}
    parts = ("model", "optimizer", "ema")
    own = {f"{part}.rank-{rank:04d}.safetensors" for part in parts for rank in (0, 1)}
    # In a file of its own is what every rank needs: buffers, and Adam's steps.
    assert files == own | {"model.whole.safetensors", "optimizer.whole.safetensors", "state.json"}
    assert {file.name for file in alone.head.checkpoints[-1].files} == {
        "state.json",
        *(f"{part}.safetensors" for part in parts),
    }, "one process alone shards nothing"
    counts = [line["metrics"] for line in sharded.lines("evaluation")]
    assert len(counts) == 6
    numerics = sharded.json("receipt.json")["numerics_key"]["stages"]["first"]
    assert numerics["sharding"] == "full"


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        (1, ("first", 0)),
        # tests/training/durable/attempt/test_ranks.py has them, of ranks with a copy each.
        pytest.param(0, ("first-evaluation", 5), marks=pytest.mark.slow),
        pytest.param(1, ("second", 5), marks=pytest.mark.slow),
    ],
)
def test_a_notice_to_either_rank_saves_every_share(
    run: Run, sharded: Run, rank: int, place: tuple[str, int]
) -> None:
    both_ranks_stop_at_a_notice(run, sharded, rank, place)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        # The two below have more ranks than before, and blocks.
        pytest.param(IN_BLOCKS, (1, 2), marks=pytest.mark.slow),
        ([SHARDED], (2, 3)),
        (IN_BLOCKS, (3, 1)),
    ],
    ids=["blocks-1-2", "2-3", "blocks-3-1"],
)
def test_another_number_of_ranks_goes_on_from_the_same_checkpoint(
    new_run: NewRun, tmp_path: Path, options: list[str], sizes: tuple[int, int]
) -> None:
    run, alone = (new_run(str(tmp_path / name / "run-1")) for name in ("run", "alone"))
    run.options = alone.options = [*options, *AVERAGED, *DOUBLE]
    assert alone.attempt() == 0
    first, then = sizes
    at_rank(0, ("first", 7), notice)
    assert set(run.attempt_with_ranks(first)) == {75}
    tiny.HOOKS.clear()
    assert set(run.attempt_with_ranks(then)) == {0}
    assert_close(run, alone, 1e-9)
    assert run.json("receipt.json")["numerics_changed"] == ["world"]


@pytest.mark.slow  # blocks stand above; both precisions are recipes of the torture
# Torch's compiler asks a gathered parameter for it, and hides the warning from others.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "option", ["precision=bfloat16", "precision=float16", "compile_mode=default"]
)
def test_in_blocks_and_lower_precision_or_compiled_it_resumes_bit_for_bit_too(
    new_run: NewRun, tmp_path: Path, option: str
) -> None:
    whole, run = (new_run(str(tmp_path / name / "run-1")) for name in ("whole", "cut"))
    whole.options = run.options = [*IN_BLOCKS, f"--override={option}"]
    assert whole.attempt_with_ranks(2) == [0, 0]
    both_ranks_stop_at_a_notice(run, whole, 1, ("first", 7))


def test_memory_is_not_tried_for_a_model_that_ranks_share(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run.attempt_with_ranks(2, "--memory-limit-mib=8000", "--override=epochs=1") == [0, 0]
    assert "[memory] stage 'first' is sharded over 2 ranks" in capfd.readouterr().out
    assert run.store.get("adaptation.json") is None


@pytest.mark.slow
def test_in_the_extra_time_of_a_notice_every_rank_writes_twice(
    run: Run, new_run: NewRun, tmp_path: Path
) -> None:
    whole = new_run(str(tmp_path / "whole" / "run-1"))
    run.options = whole.options = [SHARDED, *AVERAGED, *LONG]
    assert whole.attempt_with_ranks(2) == [0, 0]
    machine = Machine(run, tmp_path / "notice.json", Clock())
    machine.trains_on_when_one_of_two_is_told(rank=1)
    machine.go_on(whole, ranks=2)
