"""Optional protocols of a workload, a stage or its samples, each needed by some commands.

A command that needs a missing one says which, and why. Methods must be callable: an attribute of
the same name, such as a list of `files`, is none of them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from training.data_report import DataReport
from training.dataset_output import FinishedFiles, Output
from training.sources import Brought, SourceFile
from training.workload import Batch, Inputs, Loss, Order, Partial, Progress, Workload


class _Callable(type(Protocol)):  # type: ignore[misc]
    """isinstance() also asks whether what has a method's name can be called."""

    def __instancecheck__(cls, instance: object) -> bool:
        methods = [name for name, member in vars(cls).items() if isfunction(member)]
        return super().__instancecheck__(instance) and all(
            callable(getattr(instance, name)) for name in methods if not name.startswith("_")
        )


@runtime_checkable
class HasNominalSamples(Protocol, metaclass=_Callable):
    """A workload that states the dataset size each recipe is made for (`measure`)."""

    @property
    def nominal_samples(self) -> Mapping[str, Mapping[str, int]]:
        """Recipe -> split ("train", "validation") -> number of samples it is made for."""


@runtime_checkable
class HasImport(Protocol, metaclass=_Callable):
    """A workload that makes its dataset of files that users bring (`data import`)."""

    def import_dataset(
        self, files: Sequence[SourceFile], out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        """Write the dataset's files into the empty folder `out`; return the manifest's `meta`.

        The meta should name the classes and the shape of what a model sees. A workload that keeps
        its position in the file `training.sources.UNFINISHED`, and leaves it there, is called again
        with a folder that was interrupted before it had a manifest.
        """


@runtime_checkable
class HasPacking(Protocol, metaclass=_Callable):
    """A workload that makes its dataset of files that users bring, file by file (`data import`).

    So the files may come from a store, the dataset may go to one while it is made, and an import
    that was interrupted goes on: `training.sources.UNFINISHED` in the output says what was begun.
    """

    def pack_dataset(
        self, files: Sequence[Brought], output: Output, seed: int, progress: Progress
    ) -> FinishedFiles:
        """Write the dataset's files; return what the manifest says of them.

        `progress` is called first with what was finished before.
        """


@runtime_checkable
class HasFiles(Protocol, metaclass=_Callable):
    """Samples that lie in several files of the dataset: a sync fetches first what is read first.

    Without it a file is fetched before others once somebody waits for it.
    """

    def files(self, indices: Order) -> Sequence[str]:
        """The files in which these samples lie, in the order in which they are needed first."""


@runtime_checkable
class HasDataOptions(Protocol, metaclass=_Callable):
    """A workload whose datasets can be made in several ways (`data make | import --override`)."""

    @property
    def data_options(self) -> Any:
        """The defaults: a frozen dataclass with fields like a config's."""

    def with_data_options(self, options: Any) -> Workload[Any]:
        """The workload that makes and imports datasets with these options."""


@runtime_checkable
class HasExample(Protocol, metaclass=_Callable):
    """A Train stage whose step can be measured and tried without data (`measure`, the ladder).

    It is the stage's last step: what grows with the steps, such as a resolution, is largest there.
    Its `model` must then read the config only: no dataset, no artifacts, no `prior`.
    """

    def example(self, size: int) -> Batch:
        """A batch of `size` samples in the form `collate` returns, each of the largest size."""


@runtime_checkable
class HasWork(Protocol, metaclass=_Callable):
    """A Train stage of epochs whose samples take another work than `example`'s in some (`measure`).

    Such as images of a resolution that grows. A plan adds up the epochs' times.
    """

    def work(self, epoch: int) -> tuple[str, float]:
        """What a sample is like in an epoch, and its FLOPs and bytes as a share of the example's.

        Epoch -1: of samples that are evaluated.
        """


@runtime_checkable
class HasUsualBatch(Protocol, metaclass=_Callable):
    """A Train stage whose batches differ in size: `example` is the largest, its time the usual one.

    Memory must hold the largest batch; hours and dollars follow from the usual one (`measure`).
    """

    def usual(self, size: int) -> Batch:
        """A batch of `size` samples in the form `collate` returns, of the average size."""


@runtime_checkable
class HasSurrogate(Protocol, metaclass=_Callable):
    """A Train stage whose loss reads data, with a step that can be measured (`measure`).

    A loss reads data if it computes on the host (`.numpy()`, a matcher) or if shapes depend on
    values (`bincount`, boolean masks, an MoE that drops nothing): there are none when it is
    measured. Runs, and the trials of the ladder, make the real step.
    """

    def surrogate(self, m: nn.Module, b: Batch) -> Loss:
        """A loss of the same memory and FLOPs as `loss` on the batch of `example`, by shapes alone.

        For instance with the matches, or the tokens per expert, that take the most memory.
        """


@runtime_checkable
class HasShards(Protocol, metaclass=_Callable):
    """A Train stage that names the blocks of its model to gather and free one at a time.

    Without it the whole model is one block: the simplest choice, which saves the least memory.
    """

    def sharded_modules(self, m: nn.Module) -> Sequence[nn.Module]:
        """Modules inside `m` that its forward calls in the same order on every rank.

        Outside a block's own forward its parameters are slices: the loss must not read them.
        """


@runtime_checkable
class HasNumerics(Protocol, metaclass=_Callable):
    """A Train stage whose code chooses by machine what changes the bits: a kernel, an algorithm.

    What is chosen at the stage's start is committed with it, as a part of the numerics key; another
    choice later is recorded like a change of GPU model.
    """

    def numerics(
        self, m: nn.Module, i: Inputs, started_with: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Choose, let `m` compute with it, and return the choice: what -> which.

        Called in every attempt right after `model`. `started_with` is the choice at the stage's
        start, empty there: keep it where this machine can. Other ranks are given rank 0's choice.
        """


@runtime_checkable
class HasShapeKey(Protocol, metaclass=_Callable):
    """A Train stage with `compile_mode` that says for which batches code is compiled anew.

    Without it that is expected of batches of another shape: their first step is long work, which a
    copy of the state is staged for and which is not begun after a notice. Uncompiled, every shape
    is as good as another.
    """

    def shape_key(self, b: Batch) -> Hashable:
        """What the compiled code depends on, such as the bucket of the images' size."""


@runtime_checkable
class HasPredict(Protocol, metaclass=_Callable):
    """A Train stage that can predict from each sample (`predict`)."""

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """One JSON-serializable mapping per sample of the batch, in order."""


@runtime_checkable
class HasShow(Protocol, metaclass=_Callable):
    """A Train stage that shows at its end what it has learned: pictures, text, tables.

    The files go to evaluation/ with those of the last evaluation; the report has pictures, .txt and
    .md as they are, and .csv as tables.
    """

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Write files for people into `out`, given the model and its last evaluation's parts.

        `m` is as in an evaluation: in eval mode, without gradients, with the moving average if
        there is one. torch is seeded. Rank 0 is asked alone, unless ranks share the model: then
        all act together, and rank 0's files are kept. What is interrupted in it is done again.
        """


@runtime_checkable
class IsShareable(Protocol, metaclass=_Callable):
    """A Prepare stage whose shards other runs may reuse (`run --artifacts-uri`, `sweep`).

    Its `key` must then cover all that `make` depends on: every config field that it reads, and the
    seed if it draws random numbers. The engine adds code, packages, device and threads.
    """

    @property
    def is_shareable(self) -> bool:
        """Whether other runs may reuse this stage's shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One unit of a Prepare stage's device work, in the recipe's shapes."""

    build: Callable[[], nn.Module]  # on the CPU; its values do not matter
    batch: Batch  # the module's only argument
    size: int  # samples in the batch


@runtime_checkable
class HasProbe(Protocol, metaclass=_Callable):
    """A Prepare stage whose device work can be measured without data (`measure`)."""

    def probe(self) -> Probe:
        """The work on one batch."""


@runtime_checkable
class HasDataInMemory(Protocol, metaclass=_Callable):
    """A workload that reads its dataset into each process's memory (for memory reservations).

    Without it no memory is reserved for data: all runs share memory-mapped files in the page cache.
    """

    def data_bytes_in_memory(self, c: Any, dataset_bytes: int) -> int:
        """Peak bytes one process holds of a dataset of `dataset_bytes`, loading included."""


@runtime_checkable
class HasFolderImport(Protocol, metaclass=_Callable):
    """A workload that makes its dataset of a folder with a layout of its own (`data import`).

    It is given the whole folder, or what is in the archive, instead of files with classes.
    """

    def import_folder(
        self, folder: Path, out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        """Write the dataset's files into the empty folder `out`; return the manifest's `meta`."""


@runtime_checkable
class HasDataCheck(Protocol, metaclass=_Callable):
    """A workload that checks what is in a dataset's files (`data check --workload`)."""

    def check_data(self, folder: Path, progress: Progress) -> DataReport:
        """Everything that is wrong with a dataset, or with the folder to be imported as one."""


@runtime_checkable
class HasResultList(Protocol, metaclass=_Callable):
    """A stage that predicts, and whose predictions have a file format: one JSON list (`predict`).

    Without it `predict` writes a line for each sample.
    """

    def result_list(self, prediction: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """What one of `predict`'s mappings adds to the list."""
