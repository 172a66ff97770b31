"""What a workload or a stage may offer besides its protocol: optional, asked for by some commands.

A command that needs one that is missing says which, and why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from training.workload import Batch, Partial


@runtime_checkable
class HasNominalSamples(Protocol):
    """A workload that says what its recipes are made for (`measure`)."""

    @property
    def nominal_samples(self) -> Mapping[str, Mapping[str, int]]:
        """Recipe -> split ("train", "validation") -> samples of the dataset it is made for."""


@runtime_checkable
class HasExample(Protocol):
    """A Train stage whose step can be measured and tried without data (`measure`, the ladder).

    Its `model` must then read nothing but the config: not the dataset, not artifacts, not `prior`.
    """

    def example(self, size: int) -> Batch:
        """A batch of `size` samples as `collate` gives them, each as large as data may make it."""


@runtime_checkable
class HasShards(Protocol):
    """A Train stage that says which blocks of its model are gathered and freed one at a time.

    Without it the whole model is one block: simplest, and the least memory saved.
    """

    def sharded_modules(self, m: nn.Module) -> Sequence[nn.Module]:
        """Modules inside `m` that its forward calls in the same order on every rank.

        Outside of a block's own forward its parameters are slices: the loss may not read them.
        """


@runtime_checkable
class HasPredict(Protocol):
    """A Train stage that says what its model makes of each sample (`predict`)."""

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """For each sample of the batch, in order, what JSON can hold."""


@runtime_checkable
class HasPictures(Protocol):
    """A Train stage that draws its last evaluation; the files go to evaluation/."""

    def illustrate(self, parts: Sequence[Partial], out: Path) -> None:
        """Write pictures of an evaluation's parts into the folder `out`."""


@runtime_checkable
class IsShareable(Protocol):
    """A Prepare stage whose shards other runs may take (`run --artifacts-uri`, `sweep`).

    Its `key` must then name all that `make` depends on: every field of the config that it reads,
    and the seed if it draws. The engine adds code, packages, device and threads.
    """

    @property
    def is_shareable(self) -> bool:
        """Whether it is so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One unit of a Prepare stage's work on the device, in the recipe's shapes."""

    build: Callable[[], nn.Module]  # on the CPU; its values do not matter
    batch: Batch  # the module's only argument
    size: int  # samples in the batch


@runtime_checkable
class HasProbe(Protocol):
    """A Prepare stage whose work on the device can be measured without data (`measure`)."""

    def probe(self) -> Probe:
        """The work on one batch."""


@runtime_checkable
class HasDataInMemory(Protocol):
    """A workload that reads its dataset into the memory of each process (room for several runs).

    Without it nothing is reserved for data: mapped files lie in the page cache once for all runs.
    """

    def data_bytes_in_memory(self, c: Any, dataset_bytes: int) -> int:
        """Most bytes that one process holds of a dataset of so many bytes, also while loading."""
