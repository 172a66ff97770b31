"""The base classes of every workload, its stages and samples; what stages take and return.

A workload is a list of stages. Only the loop owns and saves mutable state (model, optimizer, step,
cursor); a workload and its stages hold none. Subclass `Workload`, `Train`, `Prepare` and `Samples`:
what is not required has a default, and a command that needs a method without one says which, and
why. Before them comes what the loop passes to stages and what they return, immutable.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from contract.errors import UserError
from training.durable import Brought, DataReport, FinishedFiles, Output, SourceFile, copy_in_splits
from training.numerics import drawing_from as drawing_from
from training.numerics import shuffled
from training.rungs import Rung as Rung
from training.settings import Milestones as Milestones
from training.settings import Settings as Settings
from training.stacking import stack, tensors_of

# Any tree (dict, list, tuple, dataclass) of tensors, or of what has a `to`: the loop moves them.
Batch: TypeAlias = Any
# Indices of samples. A list of a million takes 16 times the memory of a tensor while it is read.
Order: TypeAlias = Tensor | NDArray[np.int64] | Sequence[int]
# (done, total): called during a workload's long work, a few times per second at most.
Progress: TypeAlias = Callable[[int, int], None]


class Config(Protocol):
    """The fields that every workload's config must have; it is a frozen, keyword-only dataclass.

    `--override name=value` may set any of its fields (int, float, bool, str, or one of these or
    None).
    """

    @property
    def seed(self) -> int:
        """The run's only source of randomness, with epoch, index, step and shard numbers."""

    @property
    def num_threads(self) -> int:
        """CPU threads of torch: in the config because their number changes the bits."""

    @property
    def deterministic(self) -> bool:
        """Whether torch must refuse nondeterministic operations."""


# Parameter name -> name in its optimizer's state (step, exp_avg ...) -> value: a tensor on the CPU,
# or a number. Parameters without state are left out; a shared one is under each of its names.
OptimizerState: TypeAlias = Mapping[str, Mapping[str, Any]]


class Dataset(Protocol):
    """A verified dataset in a local folder."""

    @property
    def folder(self) -> Path:
        """The folder with all of the manifest's files; waits for a sync to end."""

    def file(self, name: str) -> Path:
        """Return one file of the manifest as soon as a sync has fetched and verified it."""

    def expect(self, names: Sequence[str]) -> None:
        """Tell a sync that is filling the folder to fetch these files first, in this order."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The full manifest: format, workload, name, files [{name, bytes, sha256}], meta."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """The result of the workload's `make_dataset`: manifest["meta"]."""

    @property
    def fingerprint(self) -> str:
        """sha256 over names and checksums of all files, for keys of derived data."""


class PriorTensors(Mapping[str, Tensor]):
    """A state_dict that can be released, which frees its memory whoever still refers to it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors: Mapping[str, Tensor] | None = tensors

    def release(self) -> None:
        """Free the tensors; reading them from now on is the workload's mistake."""
        self._tensors = None

    def __getitem__(self, name: str) -> Tensor:
        return self._there[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)

    @property
    def _there(self) -> Mapping[str, Tensor]:
        if self._tensors is None:
            raise UserError(
                "a stage reads the tensors of `prior` after its start, when they have been freed; "
                "let `start` put what is needed into the model, or a Prepare stage into shards"
            )
        return self._tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """The committed result of the last Train stage, read from the store (never from memory).

    A Prepare stage can use its tensors throughout, a Train stage until it has started: then their
    memory is freed. `optimizer()` reads the state of its optimizer, which is not kept in memory
    otherwise: once or twice the size of the model.
    """

    stage: str
    step: int  # global over the run's Train stages
    model: Mapping[str, Tensor]  # state_dict on the CPU, each tensor in memory of its own
    metrics: Mapping[str, float]  # of the stage's last evaluation
    optimizer: Callable[[], OptimizerState]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The inputs of a stage, which it may read but must not change.

    `artifact(name)` returns the published shards of the Prepare stage `name`, in shard order:
    one mapping of tensors per shard, memory mapped from safetensors files in the local cache (copy
    what you compute on in place; stacking or indexing with a list copies). `prior` is None before
    the end of the first Train stage. `rank` counts the `world` processes from 0. In `start`,
    `is_given_weights` says that --init-from's weights will replace what it leaves in the model.
    """

    config: Any
    dataset: Dataset
    artifact: Callable[[str], Sequence[Mapping[str, Tensor]]]
    prior: Prior | None
    device: torch.device
    rank: int
    world: int
    seed: int
    scratch: Path  # local, for downloads and caches; may be empty in every attempt
    is_given_weights: bool = False


def release_prior(inputs: Inputs) -> None:
    """Free the previous stage's tensors, wherever these inputs are held."""
    if inputs.prior is not None and isinstance(inputs.prior.model, PriorTensors):
        inputs.prior.model.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The result of `Train.start`: failed checks as sentences (they stop the run), and facts.

    With `optimizer`, the stage's optimizer starts from that state, which may be derived from
    `i.prior.optimizer()`; parameters that it does not name start without any. Refused if the model
    is sharded over ranks.
    """

    failures: Sequence[str] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    optimizer: OptimizerState = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A micro-batch's loss, in the form that accumulation needs.

    The step's loss is (sum of all `total`) / (sum of all `Train.weight`) + (mean over micro-batches
    of `mean`). In a step that weighs 0 over all micro-batches and ranks nothing is divided: a
    `total` over nothing is 0, a detector's is that of the background. `metrics` are (sum, count)
    pairs, added up over micro-batches and logged as sum / count.
    """

    total: Tensor  # scalar, differentiable: summed over what `weight` counts, not averaged
    mean: Tensor | None = None  # scalar, differentiable: e.g. an auxiliary or regularising term
    metrics: Mapping[str, tuple[Tensor | float, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """Results of one evaluation batch: (sum, count) pairs, tensors for what needs all batches."""

    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One unit of a Prepare stage's device work, in the recipe's shapes."""

    build: Callable[[], nn.Module]  # on the CPU; its values do not matter
    batch: Batch  # the module's only argument
    size: int  # samples in the batch


# Writes a model, with its weights, to a new file or folder.
Writer: TypeAlias = Callable[[nn.Module, Path], None]


class Samples:
    """An indexed set of samples. A sample depends only on (seed, epoch, index).

    Epochs count from 0 within the stage; evaluated samples have the epoch -1.
    """

    REQUIRED = ("__len__", "get")

    def __len__(self) -> int:
        """Number of samples."""
        raise NotImplementedError

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        """One sample; augmentation draws from `rng` (CPU, seeded from seed, epoch and index)."""
        raise NotImplementedError

    def collate(self, items: Sequence[Any]) -> Batch:
        """Combine what `get` returned into a batch, on the CPU.

        With this default, for samples of equal shapes, loader workers share the work on each batch
        and write it without a copy. What another draws follows from seed, epoch and first index.
        """
        return stack(items)

    def order(self, epoch: int, seed: int) -> Order:
        """Return every index exactly once."""
        return shuffled(len(self), epoch, seed)

    def files(self, indices: Order) -> Sequence[str]:
        """Return the dataset's files that hold these samples, in the order of their use.

        A sync fetches these first, and others once something waits for them.
        """
        return ()


class DatasetSamples(Samples):
    """The items of a map-style dataset, such as torchvision's, as samples.

    What a random transform draws from torch, numpy and `random` follows from `rng`.
    """

    def __init__(self, dataset: Any) -> None:
        if not hasattr(type(dataset), "__len__"):
            raise UserError(f"{type(dataset).__name__} has no len(); use a map-style dataset")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        with drawing_from(rng):
            return self.dataset[index]


class Prepare:
    """A stage that derives data; each shard is published and reused by every later attempt."""

    REQUIRED = ("name", "num_shards", "key", "make")

    if TYPE_CHECKING:
        # Attributes or properties of the subclass.

        @property
        def name(self) -> str:
            """Unique in the workload; used in metrics and by `Inputs.artifact`."""

        @property
        def num_shards(self) -> int:
            """Number of shards: enough that making each takes seconds."""

        @property
        def is_shareable(self) -> bool:
            """Whether other runs may reuse this stage's shards (`run --artifacts-uri`, `sweep`).

            Its `key` must then cover all that `make` depends on: every config field it reads,
            and the seed if it draws random numbers. The engine adds code, packages, device and
            threads.
            """

    else:
        is_shareable = False

    def key(self, i: Inputs) -> str:
        """The artifact's key: a hash over weights, preprocessing and data; [a-z0-9-] only."""
        raise NotImplementedError

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        """Make shard `shard`: pure and repeatable (generators are seeded from seed and shard)."""
        raise NotImplementedError

    def probe(self) -> Probe:
        """Return the stage's device work on one batch, for `measure` to run without data."""
        raise NotImplementedError


class Train:
    """A stage that trains a model."""

    REQUIRED = ("name", "settings", "model", "optimizer", "samples", "loss")

    if TYPE_CHECKING:
        # Attributes or properties of the subclass.

        @property
        def name(self) -> str:
            """Unique in the workload."""

        @property
        def settings(self) -> Settings:
            """Length, batches, schedule, precision. By default those of the stage's `config`."""

    else:
        # Not a property, which would hide a field of that name.
        settings = cached_property(lambda self: self.config.settings)

    def model(self, i: Inputs) -> nn.Module:
        """A freshly initialised model on the CPU (generators are seeded before the call)."""
        raise NotImplementedError

    def optimizer(self, m: nn.Module) -> Optimizer:
        """The optimizer with its parameter groups, learning rates and weight decay."""
        raise NotImplementedError

    def samples(self, i: Inputs, split: str) -> Samples:
        """Samples of split "train" or "validation"."""
        raise NotImplementedError

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        """Forward in train mode; `step` counts the stage's `num_steps` steps from 0."""
        raise NotImplementedError

    def weight(self, b: Batch) -> float:
        """Return the loss's divisor, known before forward; by default the number of samples."""
        if not (tensors := tensors_of(b)):
            raise UserError(f"stage {self.name!r}: its batches have no tensor to count; add weight")
        return float(len(tensors[0]))

    def refusals(self, meta: Mapping[str, Any]) -> Sequence[str]:
        """Return reasons not to train on a dataset with this `meta`, asked for before a run."""
        return ()

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Called once at the stage's start: initialize from `i.prior`, check preconditions."""
        return Start()

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Forward in eval mode, without gradients. By default the loss and its metrics."""
        loss, weight = self.loss(m, b, 0, 1), self.weight(b)
        total = float(loss.total) + weight * float(0.0 if loss.mean is None else loss.mean)
        metrics = {name: (float(value), count) for name, (value, count) in loss.metrics.items()}
        return Partial(sums={"loss": (total, weight), **metrics})

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Metrics of one evaluation from its ordered parts; may write files for people to `out`.

        By default sum / count of each of the parts' `sums`.
        """
        totals: dict[str, tuple[float, float]] = {}
        for part in parts:
            for name, (value, count) in part.sums.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = before[0] + value, before[1] + count
        return {name: value / count for name, (value, count) in totals.items() if count}

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Show what the stage has learned, at its end: write pictures, text, tables into `out`.

        The files go to evaluation/ with those of the last evaluation, whose `parts` these are; the
        report shows pictures, .txt and .md as they are, and .csv as tables. `m` is as in an
        evaluation: in eval mode, without gradients, with the moving average if there is one. torch
        is seeded. Called on rank 0 alone, unless ranks share the model: then on all together, and
        rank 0's files are kept. If it is interrupted, it is called again.
        """

    def sharded_modules(self, m: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of the model to gather and free one at a time, if ranks share it.

        With `compile_mode`, also those to compile one by one: identical blocks share code. They
        must be modules inside `m` that its forward calls in the same order on every rank. Outside a
        block's own forward its parameters are slices, which the loss must not read. By default the
        model is one block: the simplest choice, which saves the least memory.
        """
        return ()

    def numerics(
        self, m: nn.Module, i: Inputs, started_with: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Choose what changes the bits, such as a kernel, for this machine: return what -> which.

        `m` must compute with the choice. The choice at the stage's start is committed with it, as
        part of the numerics key; another choice later is recorded like a change of GPU model.
        Called in every attempt right after `model`. `started_with` is the choice at the stage's
        start, empty at the start itself: keep it if this machine can. Other ranks get rank 0's.
        """
        return {}

    def shape_key(self, b: Batch) -> Hashable:
        """Return what compiled code depends on, such as the images' size bucket (`compile_mode`).

        The first step with a new key is long work: a copy of the state is staged before it, and it
        is not begun after a notice. By default the shapes of all tensors. Without compilation, the
        shape does not matter.
        """
        return tuple(tensor.shape for tensor in tensors_of(b))

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """One JSON-serializable mapping per sample of the batch, in order (`predict`)."""
        raise NotImplementedError

    def result_list(self, prediction: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return what one of `predict`'s mappings adds to a JSON list, if lines are not used."""
        raise NotImplementedError

    def draw(self, m: nn.Module, i: Inputs, images: Sequence[Path], out: Path) -> None:
        """Draw what is found in images outside a dataset into `out` (`predict --images`)."""
        raise NotImplementedError

    def continued(
        self, m: nn.Module, i: Inputs, prompts: Sequence[str], how: tuple[int, float, int]
    ) -> Sequence[str]:
        """Continue texts (`predict --prompt`); `how`: most tokens (or 0), temperature, seed."""
        raise NotImplementedError

    def example(self, size: int) -> Batch:
        """A batch of `size` samples, each of the largest size (`measure`, the ladder).

        In the form that `collate` returns. The step tried on it is the stage's last, where anything
        that grows with the steps, such as a resolution, is largest. `model` must then read only the
        config: no dataset, no artifacts, no `prior`.
        """
        raise NotImplementedError

    def usual(self, size: int) -> Batch:
        """A batch of the average size, if batches differ in size (`measure`).

        Memory must hold the largest batch; hours and dollars follow from the usual one. By default
        the same as `example`.
        """
        return self.example(size)

    def work(self, epoch: int) -> tuple[str, float]:
        """Describe an epoch's samples, with their FLOPs and bytes as a share of the example's.

        For work that changes with the epochs, such as images of growing resolution: a plan adds up
        the epochs' times. Epoch -1 stands for evaluated samples.
        """
        raise NotImplementedError

    def first_files(self) -> int:
        """Return how many of `Samples.files` a first step reads, for plans; by default all."""
        raise NotImplementedError

    def surrogate(self, m: nn.Module, b: Batch) -> Loss:
        """Return a loss with the memory and FLOPs of `loss` on `example`'s batch, by shapes alone.

        For a loss that reads values, which do not exist in `measure`: one that computes on the host
        (`.numpy()`, a matcher), or whose shapes depend on values (`bincount`, boolean masks, an MoE
        that drops nothing). Assume, for instance, the matches or the tokens per expert that take
        the most memory. Runs, and the trials of the ladder, make the real step.
        """
        raise NotImplementedError

    def from_foreign(
        self, m: nn.Module, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor] | None:
        """Return another library's tensors (`--init-from`) as the state of `m`; None if unknown."""
        return None

    def formats(self) -> Mapping[str, Writer]:
        """Return the formats in which other libraries read the model (`export --format`)."""
        return {}

    def companions(
        self, meta: Mapping[str, Any], read: Callable[[str], bytes]
    ) -> Mapping[str, bytes]:
        """Return what an export needs besides, by file name; `read` gives the dataset's files."""
        return {}


C = TypeVar("C", bound=Config)


class Workload(Generic[C]):
    """A named list of stages with recipes. Holds no mutable state."""

    REQUIRED = ("name", "recipes", "stages")

    if TYPE_CHECKING:
        # Attributes or properties of the subclass.

        @property
        def name(self) -> str:
            """The name that `--workload` takes."""

        @property
        def recipes(self) -> Mapping[str, Callable[[], C]]:
            """Recipe name -> function that returns one complete config."""

        @property
        def placement_fields(self) -> frozenset[str]:
            """Config fields (paths) that another attempt may change, besides `loader_workers`."""

        @property
        def nominal_samples(self) -> Mapping[str, Mapping[str, int]]:
            """Recipe -> split -> number of samples that the recipe is made for (`measure`)."""

        @property
        def data_options(self) -> Any:
            """The default options for making datasets (`data make | import --override`).

            A frozen dataclass with fields like a config's; None if there are no options.
            """

    else:
        placement_fields = frozenset()
        nominal_samples = MappingProxyType({})
        data_options = None

    def stages(self, c: C) -> Sequence[Prepare | Train]:
        """The stages in order: pure, unique names, at least one Train."""
        raise NotImplementedError

    def fitted(self, c: C, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """Return overrides that a dataset with this `meta` needs; a run's own take precedence."""
        return {}

    def rungs(self, c: C) -> Sequence[Rung]:
        """The out-of-memory ladder, mildest first; may be empty."""
        return ()

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        """Write a dataset's files into the empty folder `out`; return the manifest's `meta`."""
        raise NotImplementedError

    def with_data_options(self, options: Any) -> "Workload[C]":
        """Return the workload with other options for its datasets; it must be a dataclass."""
        return replace(self, data_options=options)  # type: ignore[type-var]

    def import_dataset(
        self, files: Sequence[SourceFile], out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        """Make a dataset from files that users bring, in the empty folder `out` (`data import`).

        Returns the manifest's `meta`, which should name the classes and the shape of what a model
        sees. A workload that leaves its position in the file `contract.keys.UNFINISHED` is
        called again with an interrupted folder. By default copies files to SPLIT/CLASS/FILE.
        """
        return copy_in_splits(files, out, seed, progress)

    def import_folder(
        self, folder: Path, out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        """Like `import_dataset`, from a folder (or unpacked archive) with a layout of its own.

        A `DataReport` as `report` in what it returns is for `--json`, not for the manifest.
        """
        raise NotImplementedError

    def pack_dataset(
        self, files: Sequence[Brought], output: Output, seed: int, progress: Progress
    ) -> FinishedFiles:
        """Like `import_dataset`, but file by file; return what the manifest says of the files.

        This lets the files come from a store, the dataset go to one while it is made, and an
        interrupted import resume: `contract.keys.UNFINISHED` in the output says what was begun.
        `progress` is called first with what was finished before.
        """
        raise NotImplementedError

    def check_data(self, folder: Path, progress: Progress) -> DataReport:
        """Report all that is wrong with a dataset, or a folder to import (`data check`)."""
        raise NotImplementedError

    def data_bytes_in_memory(self, c: C, dataset_bytes: int) -> int:
        """Peak bytes that one process holds of a dataset of `dataset_bytes`, loading included."""
        return 0


def implements(
    owner: Workload[Any] | Prepare | Train | Samples, method: Callable[..., Any]
) -> bool:
    """Whether the class of `owner` overrides this method of its base class: `Train.predict`."""
    return getattr(getattr(owner, method.__name__), "__func__", None) is not method
