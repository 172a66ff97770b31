"""What fine-tuning makes of a model, to be counted: adapters, frozen matrices in four bits, and an
optimizer whose state has eight.

Shapes and bytes are those of peft (LoRA, Hu et al. 2021) and bitsandbytes (QLoRA, Dettmers et al.
2023; 8-bit optimizers, 2021), which this does not need: nothing is trained.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# A scale of a byte for 64 values, whose own scales are negligible; of an 8-bit state, a float32 for
# 256 values. Smaller parameters keep a state of float32.
_OF_ONE_SCALE, _OF_ONE_STATE, _SMALLEST = 64, 256, 4096


class _Product(torch.autograd.Function):
    """A product with a packed matrix, which is unpacked for it, in forward and in backward."""

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
    """A frozen matrix in four bits."""

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
    """A frozen matrix and two of low rank beside it, which alone are trained."""

    def __init__(self, base: nn.Module, inside: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (
            nn.Linear(inside, rank, bias=False),
            nn.Linear(rank, out, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        low: Tensor = self.up(self.down(x.to(self.down.weight.dtype))) * 2.0
        return y + low.to(y.dtype)


def adapted(
    make: Callable[[int], tuple[Any, ...]], *, rank: int, dtype: torch.dtype, four_bit: bool
) -> Callable[[int], tuple[Any, ...]]:
    """Return what makes the model frozen in `dtype`, with an adapter at each matrix but the head's.

    four_bit: the matrices themselves in four bits, where they are nn.Linear.
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
    """Inputs and outputs of a matrix; GPT-2's Conv1D is one, transposed. None: it is none."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor):
        return module.weight.shape[0], module.weight.shape[1]
    return None


def in_bfloat16(make: Callable[[int], tuple[Any, ...]]) -> Callable[[int], tuple[Any, ...]]:
    """Return what makes the model with parameters, gradients and inputs in bfloat16."""
    from torch.utils._pytree import tree_map_only

    def make_halved(samples: int) -> tuple[Any, ...]:
        model, batch, *loss = make(samples)

        def halved(tensor: Tensor) -> Tensor:
            return tensor.bfloat16() if tensor.is_floating_point() else tensor

        _cast(model, torch.bfloat16)
        return (model, tree_map_only(Tensor, halved, batch), *loss)

    return make_halved


class AdamW8bit(torch.optim.Optimizer):
    """AdamW's two states in eight bits, of parameters large enough; its kernel needs no more."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state of each parameter, and change the parameter in place."""
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
