"""Sums over ranks equal those of one process, added up by pairs, whatever the shapes."""

import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contract.trainer_options import RANKS
from tests.training.durable.attempt.processes import on_ranks
from training.durable.attempt.world import World
from training.engine import reduction
from training.engine.batches import own_micro_batches
from training.engine.reduction import (
    SHARES,
    BucketLayout,
    Reduction,
    _most_set_aside,
    add,
    buckets,
    share_of,
    tree_sum,
    turns,
)


def by_pairs(values: list[Tensor | None]) -> Tensor | None:
    """The sum that is promised, written down as plainly as can be."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [b if a is None else a if b is None else a + b for a, b in pairs]
    return values[0]


def in_shares(values: list[Tensor]) -> list[Tensor | None]:
    shares: list[Tensor | None] = [None] * SHARES
    for number, value in enumerate(values):
        place = share_of(number, len(values))
        before = shares[place]
        shares[place] = value if before is None else before + value
    return shares


def accumulated(values: list[Tensor], rank: int, size: int) -> Tensor | None:
    """What a rank has after its turns, as backward and the loop add up."""
    total: Tensor | None = None
    aside: list[Tensor | None] = []
    own = own_micro_batches(len(values), rank, size)
    for turn, number in zip(turns(len(values), rank, size), own, strict=True):
        if turn.sets_aside:
            aside.append(total)
            total = None
        total = values[number] if total is None else total + values[number]
        for _ in range(turn.joins):
            (total,) = add([aside.pop()], [total])
    assert not aside
    return total


@pytest.mark.parametrize("num_micro", [*range(1, 21), 32, 100])
def test_the_turns_of_any_number_of_ranks_make_one_sum(num_micro: int) -> None:
    generator = torch.Generator().manual_seed(num_micro)
    values = [torch.randn(40, generator=generator) for _ in range(num_micro)]
    whole = by_pairs(in_shares(values))
    assert whole is not None
    for size in RANKS:
        assert [n for r in range(size) for n in own_micro_batches(num_micro, r, size)] == list(
            range(num_micro)
        )
        copies = [value.clone() for value in values]
        ranks = [accumulated(copies, rank, size) for rank in range(size)]
        total = by_pairs(ranks)
        assert total is not None and torch.equal(total, whole), size


def test_two_micro_batches_need_no_second_sum_and_any_number_at_most_three_more() -> None:
    assert [_most_set_aside(n) for n in (1, 2, 3, 4, 5, 8, 16, 1000)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_numbers_are_added_up_by_pairs_and_a_zero_has_no_sign() -> None:
    numbers = [random.Random(n).uniform(-1, 1) for n in range(SHARES)]
    (expected,) = [by_pairs([torch.tensor(n, dtype=torch.float64) for n in numbers])]
    assert expected is not None and tree_sum(numbers) == expected.item()
    assert str(tree_sum([-0.0] * SHARES)) == "0.0"


def test_buckets_come_from_the_last_tensor_on_each_of_one_type() -> None:
    big, half = torch.empty(2**22), torch.empty(8, dtype=torch.bfloat16)
    assert buckets([big, half, big, big, half]) == [[4, 1], [3, 2], [0]]


def tensors(rank: int) -> list[Tensor | None]:
    """Shapes of all kinds; every third is missing somewhere, the last one everywhere but on 1."""
    made: list[Tensor | None] = []
    for number, shape in enumerate([(), (1,), (33, 7), (4, 3, 3, 3), (1000,), (5,)]):
        generator = torch.Generator().manual_seed(100 * rank + number)
        made.append(torch.randn(shape, generator=generator))
        if number % 3 == 0 and rank % 2:
            made[-1] = None
    made.append(torch.full((3,), -0.0) if rank == 1 else None)
    return made


def test_a_processor_s_bucket_keeps_its_memory_from_step_to_step() -> None:
    layout = BucketLayout([torch.empty(3)])
    first, _ = layout.packed([torch.ones(3)])
    second, (part,) = layout.packed([torch.full((3,), 2.0)])
    assert first.data_ptr() == second.data_ptr()
    assert part.tolist() == [2.0, 2.0, 2.0]


def test_a_bucket_is_added_up_while_backward_goes_on(tmp_path: Path) -> None:
    def act(world: World, root: Path) -> None:
        adding = Reduction(world, is_ring=False)
        value = torch.full((1000,), float(world.rank + 1))
        (total,) = adding.begin(BucketLayout([value]), [value])
        deadline = time.monotonic() + 60
        while not torch.equal(total, torch.full((1000,), 10.0)):
            assert time.monotonic() < deadline, "nobody has called `end`"
            time.sleep(0.01)
        adding.end()

    on_ranks(4, tmp_path, act)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_add_up_as_one_process_by_pairs(size: int, tmp_path: Path) -> None:
    def act(world: World, root: Path) -> None:
        like = [torch.empty(0) if t is None else t for t in tensors(0)]
        like[3] = like[3].to(memory_format=torch.channels_last)
        like[6] = torch.empty(3)
        adding = Reduction(world, is_ring=False)
        sums = []
        for part in ([0, 1, 2], [3, 4], [5], [6]) * 3:  # more buckets than may be under way
            own = tensors(world.rank)
            layout = BucketLayout([like[number] for number in part])
            sums.append(adding.begin(layout, [own[number] for number in part]))
        adding.end()
        expected = [by_pairs(list(each)) for each in zip(*map(tensors, range(size)), strict=True)]
        found = [tensor for part in sums for tensor in part]
        for number, tensor in enumerate(found):
            assert torch.equal(tensor, expected[number % 7]), number  # type: ignore[arg-type]
            assert tensor.stride() == like[number % 7].stride()
            assert tensor.data_ptr() % reduction.ALIGNMENT == 0
        assert str(found[6][0].item()) == "-0.0", "who has nothing adds nothing, not even a sign"

    on_ranks(size, tmp_path, act)
