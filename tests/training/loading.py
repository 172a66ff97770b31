"""Samples for tests of the loader, stacked or with a collate of their own, and their batches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from training.engine.batches import MicroBatch
from training.engine.loader import Loader
from training.workload import Order, Samples

CPU = torch.device("cpu")


class Stacked(Samples):
    """Samples with randomness, whose last bits depend on the number of threads."""

    def __init__(self) -> None:
        self.table = torch.linspace(0, 1, 60_000).reshape(10, 6000)

    def __len__(self) -> int:
        return 10

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        x = self.table[index] + torch.rand(6000, generator=rng)
        return {
            "sum": x.sum(),
            "x": (x.view(60, 100).T, x[:7].bfloat16()),
            "array": np.arange(index, index + 3, dtype=np.int16),
            "numbers": [index, index / 3, index > 4],
        }

    def order(self, epoch: int, seed: int) -> Order:
        return range(10)


class WithoutBytes(Stacked):
    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        return {"boxes": torch.zeros(0, 4)}


class Pair(NamedTuple):
    boxes: list[Tensor]
    about: list[dict[str, Any]]


class Padded(Stacked):
    """Samples of different sizes, some empty, in a batch of everything that there is, mixed."""

    def collate(self, items: Sequence[Any]) -> Any:
        numbers = [int(item["numbers"][0]) for item in items]
        padded = torch.zeros(len(items), max(numbers) + 1, 3)
        boxes = [
            item["x"][0][: number % 4, :4] for item, number in zip(items, numbers, strict=True)
        ]
        for row, number in enumerate(numbers):
            padded[row, :number] = items[row]["sum"]
        pictures = torch.stack([item["x"][0].reshape(20, 50, 6) for item in items])
        return {
            "padded": padded,
            "targets": Pair(boxes, [{"id": number, "name": f"n{number}"} for number in numbers]),
            "strided": items[0]["x"][0][:, ::7],
            "expanded": items[0]["sum"].expand(5, 2),
            "pictures": pictures.permute(0, 3, 1, 2),
            "half": items[0]["x"][1],
            "array": np.stack([item["array"] for item in items]),
            "learned": torch.nn.Parameter(items[0]["sum"]),
            "sparse": padded[0].to_sparse(),
            "none": None,
            "mixed": (torch.distributions.Beta(0.4, 0.4).sample((2,)), np.random.random()),
        }


MICRO_BATCHES = [
    MicroBatch(number=0, epoch=epoch, ids=range(first, min(first + 3, 10)))
    for epoch in range(2)
    for first in range(0, 10, 3)
]


def loaded(samples: Any, num_workers: int, first: int = 0) -> list[Any]:
    micro_batches = MICRO_BATCHES[first:]
    loader = Loader(samples, 7, micro_batches, num_workers=num_workers, device=CPU)
    made = [loader.next() for _ in micro_batches]
    with pytest.raises(StopIteration):
        loader.next()
    loader.close()
    return made


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        if one.layout is torch.strided:
            assert one.stride() == other.stride()
            assert one.data_ptr() % 64 == other.data_ptr() % 64 or not one.numel()
        assert torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other
