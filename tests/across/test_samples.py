"""Every sample exactly once per epoch, proved from counts and digests."""

import random
from typing import Any

import numpy as np

from contract.samples import MODULUS, lineage_problems, sum_of_all
from training.engine.step_log import _sample_digest


def step(number: int, epoch: int, ids: list[int], split: int = 4) -> dict[str, Any]:
    return {"stage": "a", "epoch": epoch, "step": number, **_sample_digest(ids, split)}


def problems(*epochs: list[list[int]], split: int = 4) -> list[str]:
    batches = [(epoch, ids) for epoch, steps in enumerate(epochs) for ids in steps]
    lines = [step(number, epoch, ids, split) for number, (epoch, ids) in enumerate(batches, 1)]
    return lineage_problems({line["step"]: line for line in lines})


def test_the_sums_of_an_epochs_steps_are_the_sum_of_all_ids() -> None:
    ids = list(range(1000))
    random.Random(1).shuffle(ids)
    steps = [_sample_digest(ids[first : first + 256], 1000) for first in range(0, 1000, 256)]
    assert sum(int(str(one["ids_sum"]), 16) for one in steps) % MODULUS == sum_of_all(1000)
    assert [one["num_samples"] for one in steps] == [256, 256, 256, 232]


def test_the_sum_knows_no_order_and_the_crc_does() -> None:
    one, other = _sample_digest([1, 2, 3], 9), _sample_digest(np.array([3, 2, 1]), 9)
    assert one["ids_sum"] == other["ids_sum"]
    assert one["ids_crc"] != other["ids_crc"]
    assert _sample_digest([1, 2, 4], 9)["ids_sum"] != one["ids_sum"]


def test_epochs_with_each_sample_once_have_no_problem() -> None:
    assert problems([[0, 1], [2, 3]], [[3, 0], [1, 2]]) == []


def test_an_odd_batch_may_be_dropped_and_the_last_epoch_cut_short() -> None:
    assert problems([[0, 1], [2, 3]], [[4, 1], [3, 0]], [[2, 1]], split=5) == []


def test_fails_a_sample_in_place_of_another() -> None:
    found = problems([[0, 1], [1, 3]], [[3, 0], [1, 2]])
    assert found == [
        "stage 'a', epoch 0: 4 samples of 4: some were seen more than once, others never"
    ]


def test_fails_an_epoch_with_too_many_samples() -> None:
    found = problems([[0, 1], [2, 3], [0]])
    assert found == ["stage 'a', epoch 0: 5 samples of 4: some were seen more than once"]


def test_fails_an_epoch_that_lacks_a_sample() -> None:
    assert problems([[0, 1], [2]], [[3, 0], [1, 2]]) == [
        "stage 'a', epoch 0: 3 samples of 4: another epoch had 4"
    ]
    assert len(problems([[0, 1], [2, 3]], [[3, 0], [1]])) == 1


def test_fails_a_step_that_is_missing() -> None:
    lines = {number: step(number, number - 1, [0, 1], 2) for number in (1, 3)}
    assert lineage_problems(lines) == ["steps are missing from the lineage: [2]"]
