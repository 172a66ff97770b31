"""Sums in one order, whatever the number of ranks: 1, 2, 4 and 8 of them give the same bits.

A step's micro-batches form eight contiguous shares, some perhaps empty. Each share is summed in
order, and the eight by pairs, ((0 1) (2 3)) ((4 5) (6 7)): a rank sums its shares, then the ranks
sum theirs, each with the next one first. As a + b is b + a, both ranks of a pair get the same.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from contract.trainer_options import RANKS
from training.durable import World
from training.engine.batches import own_micro_batches
from training.stacking import ALIGNMENT

# The number of contiguous shares of a step's micro-batches.
SHARES = 8
# As in DDP: large enough for a network's speed, small enough to begin while backward runs.
_BUCKET_BYTES = 25 * 2**20
# Buckets on a GPU, each with memory for what it receives.
_MOST_UNDER_WAY = 4
# Stands for a rank that has nothing to add: x + -0.0 is x, even where x is -0.0.
_NOTHING = -0.0


class Turn(NamedTuple):
    """The work around a micro-batch, whose gradients are added to those before it."""

    sets_aside: bool  # before it, the sum so far: the micro-batch begins a new sum
    joins: int  # after it: the number of sums set aside that are added now, the last one first


def share_of(number: int, num_micro: int) -> int:
    """Return the share that a micro-batch belongs to."""
    return ((number + 1) * SHARES - 1) // num_micro


@cache
def turns(num_micro: int, rank: int, size: int) -> Sequence[Turn]:
    """The turns of a rank, one for each of its micro-batches."""
    if size not in RANKS:
        return [Turn(sets_aside=False, joins=0)] * len(own_micro_batches(num_micro, rank, size))

    def of_shares(first: int, last: int) -> list[Turn]:
        if last - first == 1:
            count = len(own_micro_batches(num_micro, first, SHARES))
            return [Turn(sets_aside=False, joins=0)] * count
        middle = (first + last) // 2
        left, right = of_shares(first, middle), of_shares(middle, last)
        # A single micro-batch is added as it comes: that takes no memory for a second sum.
        if left and len(right) > 1:
            right[0] = right[0]._replace(sets_aside=True)
            right[-1] = right[-1]._replace(joins=right[-1].joins + 1)
        return left + right

    each = SHARES // size
    return of_shares(rank * each, (rank + 1) * each)


def _most_set_aside(num_micro: int) -> int:
    """Return the most sums that a single rank keeps besides the one it adds to."""
    most = count = 0
    for turn in turns(num_micro, 0, 1):
        most = max(most, count := count + turn.sets_aside)
        count -= turn.joins
    return most


def sums_set_aside(model: nn.Module, num_micro: int) -> list[Tensor]:
    """Allocate as much as the sums that wait while one rank computes a step's last micro-batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    count = _most_set_aside(num_micro)
    return [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in trained * count]


def tree_sum(by_share: Sequence[float]) -> float:
    """Sum one number per share, 0 for an empty share, in the order of gradients."""
    while len(by_share) > 1:
        by_share = [a + b for a, b in zip(by_share[::2], by_share[1::2], strict=True)]
    return by_share[0] + 0.0  # turns -0.0 into 0.0


def add(left: list[Tensor | None], right: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add the right tensors to the left ones, in place; None adds nothing."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the tensors' numbers by type, last first, as backward computes their gradients."""
    found: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for number in reversed(range(len(tensors))):
        tensor = tensors[number]
        bucket, num_bytes = open_buckets.get(tensor.dtype, ([], _BUCKET_BYTES))
        if num_bytes >= _BUCKET_BYTES:
            bucket, num_bytes = [], 0
            found.append(bucket)
        bucket.append(number)
        open_buckets[tensor.dtype] = bucket, num_bytes + tensor.nbytes
    return found


class BucketLayout:
    """Where tensors of one type are in a piece of memory, aligned as torch aligns its own."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like, size = like[0], like[0].element_size()
        self._places: list[tuple[torch.Size, tuple[int, ...], int]] = []
        end = 0
        for tensor in like:
            # The strides of a gradient, which is laid out as its parameter is.
            strides = torch.empty_like(tensor, device="meta").stride()
            self._places.append((tensor.size(), strides, end))
            end += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT // size
        # Ranks halve it up to three times.
        whole = ALIGNMENT // size * SHARES
        self._numel = math.ceil(end / whole) * whole
        self._kept: Tensor | None = None

    def packed(self, values: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """Return the values in one piece of memory, and its parts; None becomes -0.0.

        On the CPU each call reuses the memory: fresh memory costs a page fault for every 4 KiB.
        """
        flat = self._like.new_empty(self._numel) if self._kept is None else self._kept
        if flat.device.type == "cpu":
            self._kept = flat
        parts = [flat.as_strided(*place) for place in self._places]
        given = [(to, value) for to, value in zip(parts, values, strict=True) if value is not None]
        if given:
            torch._foreach_copy_([part for part, _ in given], [value for _, value in given])
        for part, value in zip(parts, values, strict=True):
            if value is None:
                part.fill_(_NOTHING)
        return flat, parts


class Reduction:
    """Sums tensors over the ranks, bucket by bucket, while other work goes on.

    All ranks begin the same buckets in the same order. With `is_ring` the library's all_reduce
    sums, in an order that depends on the number of ranks.
    """

    def __init__(self, world: World, *, is_ring: bool) -> None:
        self._world = world
        self._is_ring = is_ring
        self._under_way: deque[Iterator[None]] = deque()
        self._received: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._tag = 0
        device = world.device
        self._stream: torch.cuda.Stream | None = None
        # Gloo makes the caller wait, and that would hold up backward.
        self._beside_backward = ThreadPoolExecutor(1, thread_name_prefix="reduction")
        self._added: list[Future[object]] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, layout: BucketLayout, values: Sequence[Tensor | None]) -> list[Tensor]:
        """Begin to sum; return the tensors that hold the sums after `end`, laid out as asked."""
        flat, parts = layout.packed(values)
        way = self._ring(flat) if self._is_ring else self._tree(flat, self._tag)
        self._tag += 1
        if self._stream is None:
            next(way)
            self._added.append(self._beside_backward.submit(list, way))
            return parts
        with self._beside():
            next(way)
            self._under_way.append(way)
            while len(self._under_way) > _MOST_UNDER_WAY:
                self._advance()
        return parts

    def end(self) -> None:
        """Wait for all sums that were begun; on a GPU, only the current stream waits."""
        for added in self._added:
            added.result()
        self._added.clear()
        with self._beside():
            while self._under_way:
                self._advance()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._tag = 0

    def _advance(self) -> None:
        way = self._under_way.popleft()
        with contextlib.suppress(StopIteration):
            next(way)
            self._under_way.append(way)

    def _beside(self) -> AbstractContextManager[object]:
        """On a GPU, enter a separate stream, after what was begun in the current one."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _tree(self, flat: Tensor, tag: int) -> Iterator[None]:
        """Halve with the nearest rank first, then double; yields where it has to wait."""
        world, first, last, distance = self._world, 0, len(flat), 1
        halvings: list[tuple[slice, slice, int]] = []
        while distance < world.size:
            partner, middle = world.rank ^ distance, (first + last) // 2
            mine, theirs = slice(first, middle), slice(middle, last)
            if world.rank & distance:
                mine, theirs = theirs, mine
            # Fresh memory costs the CPU a page fault for every 4 KiB.
            kept = self._received.setdefault((middle - first, flat.dtype), [])
            received = kept.pop() if kept else torch.empty_like(flat[mine])
            works = world.swap(flat[theirs], received, partner, tag)
            yield
            for work in works:
                work.wait()
            flat[mine].add_(received)
            kept.append(received)
            halvings.append((mine, theirs, partner))
            first, last, distance = mine.start, mine.stop, 2 * distance
        for mine, theirs, partner in reversed(halvings):
            works = world.swap(flat[mine], flat[theirs], partner, tag)
            yield
            for work in works:
                work.wait()

    def _ring(self, flat: Tensor) -> Iterator[None]:
        work = self._world.sum_later(flat)
        yield
        if work is not None:
            work.wait()
