"""A stage without a run, to measure or to try: only shapes matter, and reads are refused.

Also a model that belongs to no workload, as such a stage: `package.module:function` returns (model,
batch) or (model, batch, loss), given nothing or a number of samples. Nothing is trained:
model and batch are built on fake tensors where that works.

Models of the transformers library, and fine-tuned variants of any model: only shapes and costs.

A config.json, or its name on the Hugging Face Hub, is enough. The shapes and bytes of adapters, of
4-bit matrices and of an 8-bit optimizer are those of peft (LoRA, Hu et al. 2021) and bitsandbytes
(QLoRA, Dettmers et al. 2023); neither is needed, as nothing is trained.
"""

import copy
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import register_flop_formula

from contract.errors import UserError
from training.registry import name_known
from training.workload import Batch, Dataset, Inputs, Loss, Settings, Train

# Tried in this order for a config that names no architecture: the first that its family has.
_TASKS = ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")
_DEFAULT_TOKENS = 512


class HuggingFace:
    """A config's model with a batch of any size: `tokens` each, or images as the config has them.

    `attention`: "eager", or "sdpa" for fused; by default fused where the library has it.
    `recomputes`: each block is computed again in backward.
    """

    def __init__(
        self,
        target: str,
        *,
        tokens: int | None,
        attention: str | None = None,
        recomputes: bool = False,
    ) -> None:
        self._config = _read(target)
        self._class = _class_of(self._config)
        self._recomputes = recomputes
        if attention:
            self._config._attn_implementation = attention
        self._config.use_cache = False
        if self._config.is_encoder_decoder and not hasattr(self._config, "decoder_start_token_id"):
            self._config.decoder_start_token_id = 0
        self._inputs = self._class.main_input_name
        if self._inputs not in ("input_ids", "pixel_values"):
            raise UserError(
                f"{self._class.__name__} takes {self._inputs}, whose shape is not in a config; "
                "pass package.module:function, which returns the model and a batch"
            )
        if tokens and self._inputs == "pixel_values":
            raise UserError("--tokens is for text: an image's number of patches is in its config")
        most = getattr(self._config, "max_position_embeddings", None) or tokens or _DEFAULT_TOKENS
        if tokens and tokens > most:
            raise UserError(f"--tokens is {tokens}; this model has {most} positions")
        self._tokens = tokens or min(_DEFAULT_TOKENS, most)

    def __call__(self, samples: int) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """Return the model, which has its own loss, and a batch."""
        from transformers.initialization import no_init_weights

        try:
            with no_init_weights():
                model = self._class._from_config(self._config)
        except ValueError as error:
            raise UserError(f"{self._class.__name__}: {error}") from None
        model.tie_weights()
        if self._recomputes:
            # Its name until transformers 5.20 was gradient_checkpointing_enable.
            now, before = "activation_checkpointing_enable", "gradient_checkpointing_enable"
            getattr(model, now if hasattr(model, now) else before)()
            model.enable_input_require_grads()
        return model, self._batch(samples)

    def _batch(self, samples: int) -> Mapping[str, Tensor]:
        if self._inputs == "pixel_values":
            side, channels = self._config.image_size, self._config.num_channels
            images = torch.zeros(samples, channels, side, side)
            return {"pixel_values": images, "labels": torch.zeros(samples, dtype=torch.long)}
        tokens = torch.zeros(samples, self._tokens, dtype=torch.long)
        classifies = self._class.__name__.endswith("SequenceClassification")
        return {"input_ids": tokens, "labels": tokens[:, 0] if classifies else tokens}


def _read(target: str) -> Any:
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
    except ImportError as error:
        raise UserError(
            f"{target}: {error}; counting a config needs the transformers library: "
            "pip install transformers"
        ) from None
    if target.endswith(".json") and not Path(target).is_file():
        raise UserError(f"{target} does not exist; pass a transformers config.json")
    try:
        return AutoConfig.from_pretrained(target)
    except (ValueError, TypeError, OSError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"transformers cannot read {target}: {reason}") from None


def _class_of(config: Any) -> Any:
    """Return the class that the config names, else that of its family's first task."""
    import transformers
    from transformers.models.auto import modeling_auto

    of_family = (
        getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(config.model_type)
        for task in _TASKS
    )
    for name in (*(config.architectures or ()), *of_family):
        found = name and getattr(transformers, name, None)
        if found:
            return found
    raise UserError(
        f"transformers cannot train model_type {config.model_type!r}; pass "
        "package.module:function, which returns the model and a batch"
    )


@contextmanager
def balanced_experts() -> Iterator[None]:
    """Make experts compute in one product that works in every precision and on fake tensors."""
    from transformers.integrations import moe

    # transformers 5.17 has no backward product of its own, 5.23 has.
    for name, passes in (("grouped_mm_fallback", 1), ("grouped_mm_fallback_backward", 2)):
        operation = getattr(torch.ops.transformers, name, None)
        if operation is not None:
            register_flop_formula(operation)(_grouped_flops(passes))
    with patch.object(moe, "_can_use_grouped_mm", lambda *of: False):
        yield


def _grouped_flops(passes: int) -> Any:
    def flops(inputs: Any, weight: Any, *rest: Any, **more: Any) -> int:
        """Every row is multiplied with the matrix of one expert."""
        return int(2 * passes * inputs[0] * weight[1] * weight[2])

    return flops


# A one-byte scale per 64 values, whose own scales are negligible; for an 8-bit state a float32 per
# 256 values. Smaller parameters keep a float32 state.
_OF_ONE_SCALE, _OF_ONE_STATE, _SMALLEST = 64, 256, 4096


class _Product(torch.autograd.Function):
    """A product with a packed matrix, which is unpacked for it in both forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return x @ packed.new_zeros(shape, dtype=x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return gradients[0] @ packed.new_zeros(ctx.shape, dtype=gradients[0].dtype), None, None


class _FourBit(nn.Module):
    """A frozen 4-bit matrix."""

    packed: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._shape, self._dtype, self.bias = tuple(linear.weight.shape), dtype, linear.bias
        numel = linear.weight.numel()
        self.register_buffer("packed", torch.zeros(numel // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(numel // _OF_ONE_SCALE, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x.to(self._dtype), self.packed, self._shape)
        return y.to(x.dtype) if self.bias is None else y.to(x.dtype) + self.bias


class _Adapter(nn.Module):
    """A frozen matrix and two low-rank ones next to it, which alone are trained."""

    def __init__(self, base: nn.Module, inside: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inside, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        low: Tensor = self.up(self.down(x.to(self.down.weight.dtype))) * 2.0
        return y + low.to(y.dtype)


def adapted(
    make: Callable[[int], tuple[Any, ...]], *, rank: int, dtype: torch.dtype, four_bit: bool
) -> Callable[[int], tuple[Any, ...]]:
    """Return `make` with the model frozen in `dtype` and an adapter at each matrix but the head's.

    four_bit: pack the matrices that are nn.Linear into four bits, too.
    """

    def make_adapted(samples: int) -> tuple[Any, ...]:
        model, *rest = make(samples)
        _cast(model.requires_grad_(False), dtype)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                shape = _shape_of(child)
                if shape is None or child is head:
                    continue
                packs = four_bit and isinstance(child, nn.Linear)
                base = _FourBit(child, dtype) if packs else child
                setattr(parent, name, _Adapter(base, *shape, rank))
        return (model, *rest)

    return make_adapted


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters; what modules share stays shared. (`to` fails on fake tensors.)"""
    cast: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if old not in cast:
                cast[old] = nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)
            module.register_parameter(name, cast[old])


def _shape_of(module: nn.Module) -> tuple[int, int] | None:
    """Return a matrix's inputs and outputs (GPT-2's Conv1D is one, transposed), or None."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor):
        return module.weight.shape[0], module.weight.shape[1]
    return None


def in_bfloat16(make: Callable[[int], tuple[Any, ...]]) -> Callable[[int], tuple[Any, ...]]:
    """Return `make` with the model's parameters, gradients and inputs in bfloat16."""

    def make_halved(samples: int) -> tuple[Any, ...]:
        model, batch, *loss = make(samples)

        def halved(tensor: Tensor) -> Tensor:
            return tensor.bfloat16() if tensor.is_floating_point() else tensor

        _cast(model, torch.bfloat16)
        return (model, tree_map_only(Tensor, halved, batch), *loss)

    return make_halved


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit states for large enough parameters; its kernel needs no other memory."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the state of each parameter, and change the parameter in place."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    numel, is_small = parameter.numel(), parameter.numel() < _SMALLEST
                    dtype = torch.float32 if is_small else torch.uint8
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros(numel, dtype=dtype)
                        state[f"{name}_scales"] = torch.zeros(numel // _OF_ONE_STATE)
                with torch.no_grad():
                    parameter.add_(parameter.grad)


# A copy of a parameter looks for its data, and goes on without.
warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors, also in a copy of a module: nn.TransformerEncoder copies its layer."""

    def __deepcopy__(self, memo: Any) -> "Fakes":
        return self


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
        if isinstance(error, _READS):
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
    has_parts = isinstance(given, tuple) and len(given) in (2, 3)
    if not has_parts or not isinstance(given[0], nn.Module):
        raise UserError(
            f"model {target!r} returns {type(given).__name__}; return (model, batch) or (model, "
            "batch, loss), where model is an nn.Module"
        )
    return given  # type: ignore[no-any-return]


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
        given = self._made(2)
        self._own_loss = given[2] if len(given) == 3 else None

    def _made(self, size: int) -> tuple[Any, ...]:
        """Return the function's result, on fake tensors unless it reads numbers."""
        try:
            with Fakes():
                return self._make(size)
        except _READS:
            return self._make(size)

    def model(self, i: Inputs) -> nn.Module:
        """The model, on the fake tensors of the caller's mode."""
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
        shapes = self._made(size)[1]
        return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), shapes)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        """Return the function's loss, else the model's own, else one that stands in for it."""
        with _refusing_errors(self.name), refusing_reads(self.name, "its step reads data", _REMEDY):
            if self._own_loss is not None:
                return Loss(total=self._own_loss(m, b))
            total, self.loss_is = _loss_of(_call(m, b))
        return Loss(total=total)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the current mode's tensors, by way of real ones if it reads numbers.

    Shared tensors stay shared.
    """
    try:
        return build()
    except _READS:  # as torchvision's RegNets, for their widths, and most models of timm do
        with _disable_current_modes():
            real = build()
    memo: dict[int, Any] = {}
    for value in tree_leaves([vars(module) for module in real.modules()]):
        if isinstance(value, Tensor) and id(value) not in memo:
            memo[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if isinstance(value, nn.Parameter):
                memo[id(value)] = nn.Parameter(memo[id(value)], value.requires_grad)
    return copy.deepcopy(real, memo)


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
