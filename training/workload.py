"""The protocols and records between the training loop and every workload.

A workload is a list of stages. The loop owns all state that changes (model, optimizer, step,
cursor) and alone saves it; a workload and its stages hold none. The slowest import here is torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

# What a workload needs of the settings, under the one import that it has anyway.
from training.settings import CompileMode as CompileMode
from training.settings import LoaderWorkers as LoaderWorkers
from training.settings import Milestones as Milestones
from training.settings import Precision as Precision
from training.settings import Schedule as Schedule
from training.settings import Settings as Settings
from training.settings import Sharding as Sharding

# Any pytree (dict, list, tuple, tensor) whose tensors the loop moves to the device.
Batch: TypeAlias = Any
# Indices of samples. A list of a million takes 16 times the memory of a tensor while it is read.
Order: TypeAlias = Tensor | NDArray[np.int64] | Sequence[int]
# done, total: called during long work of a workload, a few times per second at most.
Progress: TypeAlias = Callable[[int, int], None]


class Config(Protocol):
    """What every workload's config must have; it is a frozen, keyword-only dataclass.

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


C = TypeVar("C", bound=Config)

# Parameter name -> name in its optimizer's state (step, exp_avg ...) -> value: a tensor on the CPU,
# or a number. Parameters without state are left out; a shared one is under each of its names.
OptimizerState: TypeAlias = Mapping[str, Mapping[str, Any]]


class Dataset(Protocol):
    """A verified dataset in a local folder."""

    @property
    def folder(self) -> Path:
        """The folder with the manifest's files: all of them, so it waits for a sync to end."""

    def file(self, name: str) -> Path:
        """One file of the manifest; waits only until the sync has fetched and verified it."""

    def expect(self, names: Sequence[str]) -> None:
        """Let a sync that is filling the folder fetch these files first, in this order."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The whole manifest: format, workload, name, files [{name, bytes, sha256}], meta."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the workload's `make_dataset` returned: manifest["meta"]."""

    @property
    def fingerprint(self) -> str:
        """sha256 over names and checksums of all files, for keys of derived data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """The committed result of the last Train stage, read from the store (never from memory).

    Its tensors are there for a Prepare stage, and for a Train stage until it has started: then
    their memory is freed. `optimizer()` reads the state of its optimizer, which nobody else holds:
    as large as the model once or twice.
    """

    stage: str
    step: int  # global over the run's Train stages
    model: Mapping[str, Tensor]  # state_dict on the CPU, each tensor in memory of its own
    metrics: Mapping[str, float]  # of the stage's last evaluation
    optimizer: Callable[[], OptimizerState]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a stage may read; it must not change any of it.

    `artifact(name)` gives the published shards of the Prepare stage called `name`, in shard order:
    one mapping of tensors per shard, memory mapped from safetensors files in the local cache (copy
    what you compute on in place; stacking or indexing with a list copies). `prior` is None before
    the end of the first Train stage. `rank` counts the `world` processes from 0.
    """

    config: Any
    dataset: Dataset
    artifact: Callable[[str], Sequence[Mapping[str, Tensor]]]
    prior: Prior | None
    device: torch.device
    rank: int
    world: int
    seed: int
    scratch: Path  # local, may be empty in every attempt: downloads, caches


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The result of `Train.start`: failed checks as sentences (they stop the run), and facts.

    With `optimizer` the stage's optimizer starts from that state, which may be made from that of
    `i.prior.optimizer()`; parameters that it does not name start without. Refused if the model is
    sharded over ranks.
    """

    failures: Sequence[str] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    optimizer: OptimizerState = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A micro-batch's loss, in the form that accumulation needs.

    The step's loss is (sum of all `total`) / (sum of all `Train.weight`) + (mean over micro-batches
    of `mean`). In a step that weighs 0 over all micro-batches and ranks the first term is 0, and so
    is its gradient; the optimizer steps as usual, with its momentum and weight decay. `metrics` are
    (sum, count) pairs, added up over micro-batches and logged as sum / count.
    """

    total: Tensor  # scalar, differentiable: summed over what `weight` counts, not averaged
    mean: Tensor | None = None  # scalar, differentiable: e.g. an auxiliary or regularising term
    metrics: Mapping[str, tuple[Tensor | float, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """Results of one evaluation batch: (sum, count) pairs, tensors for what needs all batches."""

    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Samples(Protocol):
    """An indexed set of samples. A sample depends on nothing but (seed, epoch, index).

    Epochs count from 0 within the stage; samples that are evaluated have the epoch -1.
    """

    def __len__(self) -> int:
        """Number of samples."""

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        """One sample; augmentation draws from `rng` (CPU, seeded from seed, epoch and index)."""

    def collate(self, items: Sequence[Any]) -> Batch:
        """Combine what `get` returned into a batch, on the CPU.

        For samples of equal shapes `collate = staticmethod(training.stacking.stack)`: loader
        workers then share the work on each batch and write it without a copy.
        """

    def order(self, epoch: int, seed: int) -> Order:
        """Every index exactly once; usually `training.randomness.shuffled(len, epoch, seed)`."""


@runtime_checkable
class Prepare(Protocol):
    """A stage that derives data; each shard is published and reused by every later attempt."""

    @property
    def name(self) -> str:
        """Unique in the workload; used in metrics and by `Inputs.artifact`."""

    @property
    def num_shards(self) -> int:
        """Number of shards: enough that making each takes seconds."""

    def key(self, i: Inputs) -> str:
        """The artifact's key: a hash over weights, preprocessing and data; [a-z0-9-] only."""

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        """Make shard `shard`: pure and repeatable (torch is seeded from seed and shard)."""


@runtime_checkable
class Train(Protocol):
    """A stage that trains a model."""

    @property
    def name(self) -> str:
        """Unique in the workload."""

    @property
    def settings(self) -> Settings:
        """Length, batches, schedule, precision."""

    def model(self, i: Inputs) -> nn.Module:
        """A freshly initialised model on the CPU (torch is seeded before the call)."""

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Called once at the stage's start: initialize from `i.prior`, check preconditions."""

    def optimizer(self, m: nn.Module) -> Optimizer:
        """The optimizer with its parameter groups, learning rates and weight decay."""

    def samples(self, i: Inputs, split: str) -> Samples:
        """Samples of split "train" or "validation"."""

    def weight(self, b: Batch) -> float:
        """What to divide the loss by (tokens, images, boxes), known before forward; 0: nothing."""

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        """Forward in train mode; `step` counts the stage's `num_steps` steps from 0."""

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Forward in eval mode, without gradients."""

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Metrics of one evaluation from its ordered parts; may write files for people to `out`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One step of the out-of-memory ladder: a config -> one that needs less memory.

    One that changes what is learned, such as the model's width, is not taken but offered: with
    `override` as NAME=VALUE. Those come last.
    """

    name: str
    apply: Callable[[Any], Any]
    override: str = ""


class Workload(Protocol[C]):
    """A named list of stages with recipes. Holds no mutable state."""

    @property
    def name(self) -> str:
        """The name that `--workload` takes."""

    @property
    def recipes(self) -> Mapping[str, Callable[[], C]]:
        """Recipe name -> function that returns one complete config."""

    @property
    def placement_fields(self) -> frozenset[str]:
        """Config fields that another attempt may change (loader workers, paths); often empty."""

    def stages(self, c: C) -> Sequence[Prepare | Train]:
        """The stages in order: pure, unique names, at least one Train."""

    def rungs(self, c: C) -> Sequence[Rung]:
        """The out-of-memory ladder, mildest first; may be empty."""

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        """Write a dataset's files into the empty folder `out`; return the manifest's `meta`."""
