"""The samples of each step, and their distribution to the ranks in micro-batches.

Global batch and micro-batch belong to the recipe: any number of ranks trains on the same
micro-batches with the same noise. Batches, which are trees of tensors, are also moved to a device
and compared by shape here.
"""

import dis
import math
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from training.engine.stage_checks import checked_order
from training.numerics import derive_seeds, seed_torch
from training.stacking import stack
from training.workload import Batch, Samples, Settings, Train, implements

# Of `get`, with self; its generator is the last. And what reads variables without naming them.
_GET_ARGUMENTS = 4
_FRAMES = {"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"}
# Far more than anybody compiles, and only kilobytes.
_MOST_KEYS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward pass."""

    number: int  # within its step, over all ranks: seeds the model's noise
    epoch: int
    ids: Sequence[int]
    counts: bool = True  # False: padding where ranks share the model, with a loss of zero


class BatchPlan:
    """The steps of one stage, from 0, as sample ids: a function of the seed alone."""

    def __init__(self, samples: Samples, settings: Settings, seed: int, world_size: int) -> None:
        # Ranks gather a sharded model together, so each must compute equally often.
        self._is_even = settings.sharding != "none"
        self.num_samples = len(samples)
        self.steps_per_epoch = settings.steps_per_epoch(self.num_samples)
        self.num_steps = settings.num_steps(self.num_samples)
        self.num_epochs = math.ceil(self.num_steps / self.steps_per_epoch)
        self.steps_per_evaluation = settings.steps_per_evaluation(self.num_samples)
        self._samples = samples
        self._seed = seed
        self._world_size = world_size
        self._global_batch = settings.global_batch
        self._micro_batch = settings.micro_batch
        self._orders: dict[int, NDArray[np.int64]] = {}

    def epoch(self, step: int) -> int:
        """The epoch of step `step`, which is also the number of complete epochs before it."""
        return step // self.steps_per_epoch

    def describe(self, steps: int) -> str:
        """Describe a number of steps, in epochs if it is a multiple of one."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return f"step {steps}" if rest else f"epoch {epochs}"

    def ids(self, step: int) -> NDArray[np.int64]:
        """The sample ids of one step; the last one of an epoch takes the remainder, if any does."""
        return self.rest_of_epoch(step)[: self._global_batch]

    def rest_of_epoch(self, step: int) -> NDArray[np.int64]:
        """The sample ids of step `step` and of those that follow in its epoch."""
        first = step % self.steps_per_epoch * self._global_batch
        return self._order(self.epoch(step))[first:]

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """All micro-batches of one step, over all ranks."""
        ids, size = self.ids(step).tolist(), self._micro_batch
        return [
            MicroBatch(number=number, epoch=self.epoch(step), ids=tuple(ids[first : first + size]))
            for number, first in enumerate(range(0, len(ids), size))
        ]

    def num_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of one step, over all ranks."""
        return math.ceil(len(self.ids(step)) / self._micro_batch)

    def share(self, step: int, rank: int) -> list[MicroBatch]:
        """The micro-batches of one rank, perhaps none in the last step of an epoch."""
        all_ranks, size = self.micro_batches(step), self._world_size
        own = own_micro_batches(len(all_ranks), rank, size)
        mine = all_ranks[own.start : own.stop]
        if self._is_even:
            wanted = math.ceil(len(all_ranks) / size)
            mine += [replace(all_ranks[0], counts=False)] * (wanted - len(mine))
        return mine

    def shares(self, first_step: int, rank: int) -> Iterator[MicroBatch]:
        """The micro-batches of one rank from `first_step` to the end of the stage."""
        for step in range(first_step, self.num_steps):
            yield from self.share(step, rank)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        # The loader runs ahead, so for a while two epochs are needed at once.
        if epoch not in self._orders:
            kept = {e: order for e, order in self._orders.items() if abs(e - epoch) <= 1}
            order = checked_order(self._samples, epoch, self._seed, twice=not self._orders)
            self._orders = kept | {epoch: order}
        return self._orders[epoch]


def own_micro_batches(num_micro: int, rank: int, size: int) -> range:
    """Return a rank's micro-batches in a step of `num_micro`: whole shares if possible."""
    return range(rank * num_micro // size, (rank + 1) * num_micro // size)


class Maker:
    """Makes samples and batches, which depend on nothing but seed, epoch and index."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._rng = torch.Generator()
        self._draws = _may_draw(samples.get)
        # If so, each row of a batch can be made on its own.
        self.stacks = samples.collate is stack or not implements(samples, Samples.collate)

    def batch(self, micro: MicroBatch) -> Batch:
        """Make a complete micro-batch on one thread, as a worker does."""
        num_threads = torch.get_num_threads()
        if num_threads != 1:
            # The number of threads can change the bits of a sample.
            torch.set_num_threads(1)
        try:
            return self.collate(self.items(micro.epoch, micro.ids), micro.epoch, micro.ids[0])
        finally:
            if num_threads != 1:
                torch.set_num_threads(num_threads)

    def items(self, epoch: int, ids: Sequence[int]) -> list[Any]:
        """Make samples of an epoch."""
        derive = derive_seeds("sample", self._seed, epoch)
        get, rng, draws, items = self._samples.get, self._rng, self._draws, []
        for index in ids:
            if draws:
                rng.manual_seed(derive(index))
            items.append(get(index, epoch, rng))
        return items

    def collate(self, items: Sequence[Any], epoch: int, first: int) -> Batch:
        """Combine samples in the workload's own way, which may draw; `first` is an index."""
        if self.stacks:
            return self._samples.collate(items)
        # Not drawing_from: saving numpy's state takes 0.3 ms, a tenth of a short step, and what
        # draws from it in training is seeded first, as this is.
        with torch.random.fork_rng(devices=[]):
            seed_torch(torch.device("cpu"), "collate", self._seed, epoch, first)
            return self._samples.collate(items)


def _may_draw(get: Callable[..., Any]) -> bool:
    """Whether `Samples.get` may use its generator: seeding one takes longer than a row."""
    code = getattr(get, "__code__", None)
    if code is None or code.co_argcount != _GET_ARGUMENTS or _FRAMES & {*code.co_names}:
        return True
    named = (instruction.argval for instruction in dis.get_instructions(code))
    rng = code.co_varnames[_GET_ARGUMENTS - 1]
    return any(rng in (name if isinstance(name, tuple) else (name,)) for name in named)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a batch to the device; no-op on the CPU."""
    if device.type == "cpu":
        return batch
    # A class of the workload's may have a `to` that takes the device alone.
    own, how = (Tensor, PackedSequence), {"non_blocking": True}
    return _mapped(batch, "to", lambda t: t.to(device, **how if isinstance(t, own) else {}))


def pinned(batch: Batch) -> Batch:
    """Copy every tensor of a batch on the CPU to page-locked memory."""
    return _mapped(batch, "pin_memory", lambda t: t if getattr(t, "is_cuda", 0) else t.pin_memory())


def _mapped(batch: Batch, method: str, act: Callable[[Any], Any]) -> Batch:
    """Act on all that has the method. What moves itself, but does not pin, stays unpinned."""
    if isinstance(batch, UserDict):  # Hugging Face's: their own `to` leaves what is nested
        moved = copy(batch)
        moved.data = {key: _mapped(value, method, act) for key, value in batch.items()}
        return moved
    if hasattr(type(batch), method):
        return act(batch)
    if isinstance(batch, Mapping) and not hasattr(type(batch), "to"):
        return {key: _mapped(value, method, act) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_mapped(value, method, act) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        own: Any = copy(batch)  # a __post_init__ has done its work
        for field in fields(batch):
            value = _mapped(getattr(batch, field.name), method, act)
            object.__setattr__(own, field.name, value)
        return own
    return batch


class CompiledShapes:
    """The batch shapes that a stage was trained on in this process, for which code is compiled.

    Without compilation all shapes count as one, and only the first step differs from the others.
    """

    def __init__(self, stage: Train) -> None:
        self._stage = stage
        self._keys: dict[Hashable, None] = {}  # the least recently used first

    def have(self, batches: Iterable[Batch]) -> bool:
        """Whether a step on these batches compiles nothing."""
        return all(self._key(batch) in self._keys for batch in batches)

    def add(self, batches: Iterable[Batch]) -> None:
        """Remember the batches of a step."""
        for key in map(self._key, batches):
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > _MOST_KEYS:
            self._keys.pop(next(iter(self._keys)))

    def _key(self, batch: Batch) -> Hashable:
        if self._stage.settings.compile_mode is None:
            return None
        return self._stage.shape_key(batch)
