"""What the loop passes to a workload's stages, what they return, and how others' models are read.

Import these names from training/workload.py, where the base classes are. Immutable.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contract.errors import UserError

# Any pytree (dict, list, tuple, tensor) whose tensors the loop moves to the device.
Batch: TypeAlias = Any
# Indices of samples. A list of a million takes 16 times the memory of a tensor while it is read.
Order: TypeAlias = Tensor | NDArray[np.int64] | Sequence[int]
# (done, total): called during a workload's long work, a few times per second at most.
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
        """What the workload's `make_dataset` returned: manifest["meta"]."""

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
    """What a stage may read but must not change.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One unit of a Prepare stage's device work, in the recipe's shapes."""

    build: Callable[[], nn.Module]  # on the CPU; its values do not matter
    batch: Batch  # the module's only argument
    size: int  # samples in the batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One step of the out-of-memory ladder: turns a config into one that needs less memory.

    A rung that changes what is learned, such as the model's width, is not taken but offered, with
    `override` as NAME=VALUE. Such rungs come last.
    """

    name: str
    apply: Callable[[Any], Any]
    override: str = ""


# Writes a model, with its weights, to a new file or folder.
Writer: TypeAlias = Callable[[nn.Module, Path], None]


class Interchange:
    """What a Train stage knows about other libraries; nothing by default."""

    def from_foreign(
        self, m: nn.Module, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor] | None:
        """Return another library's tensors (`--init-from`) as the state of `m`; None if unknown."""
        return None

    def formats(self) -> Mapping[str, Writer]:
        """Return the formats in which other libraries read the model (`export --format`)."""
        return {}
