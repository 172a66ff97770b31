"""A stage without a run, to measure or to try: only shapes matter, and reads are refused.

Also a model that belongs to no workload, as such a stage: `package.module:function` returns (model,
batch) or (model, batch, loss), given nothing or a number of samples. Nothing is trained:
model and batch are built on fake tensors where that works.
"""

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from contract.errors import UserError
from training.preflight.borrowed import AdamW8bit
from training.registry import name_known
from training.workload import Batch, Dataset, Inputs, Loss, Settings, Train

# (step, num_steps): what grows over a stage, such as a resolution, is largest in the last step.
LAST_STEP = (999, 1000)

_OptimizerName: TypeAlias = Literal["adamw", "sgd", "adamw-8bit"]
_Make: TypeAlias = Callable[[int], tuple[Any, ...]]
_READS = (DataDependentOutputException, DynamicOutputShapeException)
_STANDS_IN = "the mean of the outputs' squares, for want of another"
_REMEDY = "let shapes alone decide what model and loss compute"


class _NoDataset:
    """A placeholder for the dataset that explains on any access why it is missing."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_data(self._stage)


def standalone_inputs(stage: str, config: Any) -> Inputs:
    """Inputs with a config only; reading data is refused."""
    return Inputs(
        config=config,
        dataset=cast(Dataset, _NoDataset(stage)),
        artifact=lambda name: _refuse_data(stage),
        prior=None,
        device=torch.device("cpu"),
        rank=0,
        world=1,
        seed=config.seed,
        scratch=Path("unused"),
    )


def _refuse_data(stage: str) -> NoReturn:
    raise UserError(
        f"stage {stage!r} cannot be measured: its model or optimizer reads the dataset or an "
        "artifact; let it take shapes from the config"
    )


# Frames between the line that reads and the error: torch, and the modes of this folder.
_BETWEEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@contextmanager
def refusing_reads(stage: str, what: str, remedy: str) -> Iterator[None]:
    """Turn the errors of fake tensors whose values are read into one sentence."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            operation = str(error)
        elif "numpy() is not supported" in str(error):
            operation = "numpy()"
        else:
            raise
        raise UserError(
            f"stage {stage!r} cannot be measured: {what} ({operation} in {_place_of(error)}), but "
            f"only shapes are known here; {remedy}"
        ) from error


def _place_of(error: BaseException) -> str:
    """Return the innermost line of the workload, or of what it calls, in the error's traceback."""
    passed = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in passed if not frame.filename.startswith(_BETWEEN)]
    if not frames:
        return "torch itself"  # called from this folder, as an optimizer is
    frame = frames[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"


@contextmanager
def _refusing_errors(target: str) -> Iterator[None]:
    """Turn whatever the user's function, or its model, raises into one sentence."""
    try:
        yield
    except (UserError, *_READS):
        raise
    except Exception as error:  # the function's own code: it may raise anything
        message = (str(error).strip().splitlines() or ["no message"])[0]
        raise UserError(
            f"model {target!r} raised {type(error).__name__}: {message} ({_place_of(error)}); "
            "correct it"
        ) from error


def load_function(target: str) -> _Make:
    """Import `package.module:function`; it takes the number of samples, or nothing at all."""
    module_name, _, name = target.partition(":")
    if not name:
        raise UserError(f"model {target!r} cannot be found; write package.module:function")
    with _refusing_errors(target):
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise UserError(f"model {target!r}: no module is named {error.name!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"model {target!r}: no function {name!r}; {name_known(name, there)}")
    parameters = inspect.signature(function).parameters.values()
    refusing = _refusing_errors(target)
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        return refusing(lambda size: _checked(target, function(size)))
    return refusing(lambda size: _resized(_checked(target, function()), size))


def _checked(target: str, given: Any) -> tuple[Any, ...]:
    if (
        not isinstance(given, tuple)
        or len(given) not in (2, 3)
        or not isinstance(given[0], nn.Module)
    ):
        raise UserError(
            f"model {target!r} returns {type(given).__name__}; return (model, batch) or (model, "
            "batch, loss), where model is an nn.Module"
        )
    return given


def _resized(given: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Return the same with `size` samples: tensors as long as the first one are resized to it."""
    tensors = [leaf for leaf in tree_leaves(given[1]) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        raise UserError("the example batch has no tensor whose first dimension counts samples")
    samples = len(tensors[0])

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != samples:
            return tensor
        return tensor.new_zeros((size, *tensor.shape[1:]))

    return (given[0], tree_map_only(Tensor, resize, given[1]), *given[2:])


class ModelStage(Train):
    """A stage for counting (training/preflight/footprint.py): it has no samples."""

    name: str
    settings: Settings

    def __init__(
        self, name: str, make: _Make, settings: Settings, optimizer_name: _OptimizerName
    ) -> None:
        self.name = name
        self.settings = settings
        self.loss_is = "the function's"
        self._make = make
        self._optimizer_name = optimizer_name
        self._real: nn.Module | None = None
        try:
            with FakeTensorMode():
                given = make(2)
        except _READS:
            # Initialization that reads numbers, such as torchvision's stochastic depth.
            given = make(2)
            self._real = given[0]
        self._own_loss = given[2] if len(given) == 3 else None

    def model(self, i: Inputs) -> nn.Module:
        """The model, on the fake tensors of the caller's mode."""
        if self._real is not None:
            return _with_empty_tensors(self._real)
        return self._make(1)[0]  # type: ignore[no-any-return]

    def optimizer(self, m: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, its 8-bit variant, or SGD with momentum, over all trained parameters."""
        trained = [p for p in m.parameters() if p.requires_grad]
        if not trained:
            raise UserError(f"model {self.name!r} has no parameter to train")
        if self._optimizer_name == "sgd":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        if self._optimizer_name == "adamw-8bit":
            return AdamW8bit(trained)
        return torch.optim.AdamW(trained)

    def sharded_modules(self, m: nn.Module) -> Sequence[nn.Module]:
        """The blocks of its longest list of modules."""
        lists = [list(module) for module in m.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=[])

    def weight(self, b: Batch) -> float:
        """Return 1: the loss is already a mean."""
        return 1.0

    def example(self, size: int) -> Batch:
        """An empty batch of `size` samples, in the function's shapes."""
        if self._real is not None:
            shapes = self._make(size)[1]
        else:
            with FakeTensorMode():
                shapes = self._make(size)[1]
        return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), shapes)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        """Return the function's loss, else the model's own, else one that stands in for it."""
        with _refusing_errors(self.name), refusing_reads(self.name, "its step reads data", _REMEDY):
            if self._own_loss is not None:
                return Loss(total=self._own_loss(m, b))
            total, self.loss_is = _loss_of(_call(m, b))
        return Loss(total=total)


def _with_empty_tensors(model: nn.Module) -> nn.Module:
    """Return a copy with tensors that the current mode makes; shared tensors stay shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (
            *module._parameters.values(),
            *module._buffers.values(),
            *vars(module).values(),
        ):
            if isinstance(value, Tensor) and id(value) not in memo:
                empty = torch.empty(value.shape, dtype=value.dtype)
                if isinstance(value, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=value.requires_grad)
                memo[id(value)] = empty
    return copy.deepcopy(model, memo)


def _call(model: nn.Module, batch: Batch) -> Any:
    """Call a model as its example batch says: by name, by position, or with one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _loss_of(output: Any) -> tuple[Tensor, str]:
    """The loss in what a model returned, and where it comes from."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named, "the model's"
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    found = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    if not found:
        raise UserError("the model returns no tensor that depends on its parameters")
    if all(leaf.dim() == 0 for leaf in found):
        return torch.stack(found).sum(), "the model's"
    return torch.stack([leaf.float().square().mean() for leaf in found]).sum(), _STANDS_IN
