"""Footprints: counted ones are taken as they are, others interpolated, and the rest refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sizing.models import footprints
from sizing.models.constants import Constants
from sizing.models.memory import gpu_memory
from tests.sizing import sample_footprints

MIB = sample_footprints.MIB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sample_footprints.write(tmp_path / "footprints.json")


def test_a_counted_micro_batch_is_taken_as_it_is(path: Path) -> None:
    (stage,) = footprints.counted_stages("trajectory", "full", path=path)
    assert stage.micro_batch == 16
    assert stage.peak_bytes == 4 * 100 * MIB + 16 * 10 * MIB
    assert stage.basis == "measured"
    assert stage.steps_per_epoch == 125
    # The slope between micro-batches.
    assert stage.kept_bytes_per_sample == 10 * MIB


def test_where_batches_differ_time_follows_from_the_usual_and_memory_from_the_largest(
    tmp_path: Path,
) -> None:
    rows = [
        sample_footprints.row(
            "detect",
            size,
            usual_peak_bytes=(400 + 4 * size) * MIB,
            usual_kept_bytes=4 * size * MIB,
        )
        for size in (8, 16)
    ]
    (tmp_path / "two.json").write_text(json.dumps({"format": 2, "footprints": rows}))
    for size in (16, 4):  # counted, and modelled
        (stage,) = footprints.counted_stages(
            "trajectory", "full", micro_batch=size, path=tmp_path / "two.json"
        )
        assert stage.kept_bytes_per_sample == 4 * MIB
        assert stage.peak_bytes == (400 + 10 * size) * MIB
        memory = gpu_memory(stage, Constants())
        assert memory.usual_need is not None and memory.usual_need < memory.need
        assert stage.usual_peak_bytes == (400 + 4 * size) * MIB
        # Besides parameters and optimizer there are 100 MiB of gradients in both.
        assert stage.largest_over_usual == (100 + 10 * size) / (100 + 4 * size)


def test_fails_on_a_micro_batch_far_beyond_those_counted(tmp_path: Path) -> None:
    path = sample_footprints.write(tmp_path / "large.json", global_batch=2048)
    (stage,) = footprints.counted_stages("trajectory", "full", micro_batch=1024, path=path)
    assert stage.basis == "modelled"
    with pytest.raises(footprints.NotMeasuredError, match="of 2048 is too far from those counted"):
        footprints.counted_stages("trajectory", "full", micro_batch=2048, path=path)


@pytest.mark.parametrize(("size", "expected"), [(4, 440), (1, 410), (2, 420)])
def test_a_micro_batch_that_was_not_counted_is_modelled(
    path: Path, size: int, expected: int
) -> None:
    (stage,) = footprints.counted_stages("trajectory", "full", micro_batch=size, path=path)
    assert stage.peak_bytes == expected * MIB
    assert stage.basis == "modelled"


def test_a_stage_with_a_batch_of_its_own_keeps_it(tmp_path: Path) -> None:
    own = [
        sample_footprints.row("tokenizer", size, recipe_micro_batch=4, global_batch=4)
        for size in (4, 8)
    ]
    others = [sample_footprints.row("head", size) for size in (8, 16)]
    content = {"format": 2, "footprints": [*own, *others]}
    (tmp_path / "two.json").write_text(json.dumps(content))
    found = footprints.counted_stages(
        "trajectory", "full", micro_batch=8, path=tmp_path / "two.json"
    )
    assert [(stage.stage, stage.micro_batch) for stage in found] == [("tokenizer", 4), ("head", 8)]


def test_gpus_that_share_a_model_hold_their_share_and_two_blocks(path: Path) -> None:
    (whole,) = footprints.counted_stages("trajectory", "full", path=path)
    shared = replace(whole, gathered_bytes=30 * MIB).sharded(4)
    # 100 MiB of parameters, as many gradients, twice as many of state, 160 of activations.
    assert shared.parameter_bytes == shared.gradient_bytes == 25 * MIB
    assert shared.optimizer_bytes == 50 * MIB
    # Three quarters are gone of all that is not gathered, and the sum of two micro-batches of four
    # that waits on one GPU.
    assert shared.peak_bytes == (560 - 0.75 * (100 - 30 + 100 + 200) - 100) * MIB
    # Parameters twice, gradients once: halves of what an all-reduce of them moves.
    assert shared.exchanged_bytes == 150 * MIB
    memory = gpu_memory(shared, Constants())
    assert memory.allocated == pytest.approx(182.5)


def test_what_the_optimizer_takes_for_a_moment_is_shared_too(path: Path) -> None:
    (whole,) = footprints.counted_stages("trajectory", "full", path=path)
    at_optimizer = replace(whole, peak_bytes=1000 * MIB, backward_peak_bytes=560 * MIB)
    assert at_optimizer.sharded(2).peak_bytes == 500 * MIB


def test_as_many_gpus_are_usable_as_a_steps_micro_batches_go_round(path: Path) -> None:
    stages = footprints.counted_stages("trajectory", "full", path=path)  # four micro-batches of 16
    assert [footprints.usable_gpus(stages, there) for there in (1, 2, 4, 8)] == [1, 2, 4, 4]
    # Its optimizer steps in backward: no gradient is left to add up.
    lean = [replace(stage, gradient_bytes=0) for stage in stages]
    assert footprints.usable_gpus(lean, 4) == 1


def test_fails_on_an_unmeasured_workload_with_the_command_that_measures_it(path: Path) -> None:
    with pytest.raises(footprints.NotMeasuredError, match=r"did you mean trajectory\?.*measure"):
        footprints.counted_stages("trajectry", "full", path=path)
    with pytest.raises(footprints.NotMeasuredError, match=r"recipe 'ful' .*did you mean full"):
        footprints.counted_stages("trajectory", "ful", path=path)


def test_fails_without_the_file_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(footprints.NotMeasuredError, match="python -m training measure"):
        footprints.counted_stages("trajectory", "full", path=tmp_path / "none.json")


def test_fails_on_another_format(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"format": 9, "footprints": []}')
    with pytest.raises(ValueError, match="format 9"):
        footprints.load(path)
