"""AdamW with its moments in bfloat16: 4 bytes per parameter instead of 8."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

# Elements converted at a time: 128 MiB for both moments, whatever the parameter's size.
_SLICE = 2**24
# The largest relative change of a number that rounding to bfloat16 may lose.
_LOST_CHANGE = 2.0**-8


class BFloat16AdamW(AdamW):
    """torch's AdamW with the same state, but `exp_avg` and `exp_avg_sq` in bfloat16.

    They are rounded to nearest once per step, after torch's own code has used them in float32, so
    no random state must be saved.
    It takes AdamW's arguments except `amsgrad` and `maximize`, and no scaled gradients (float16).
    `betas[1]` must forget at least 1/128 per step (0.95 is usual for language models; with torch's
    default of 0.999, the second moment could only grow).
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), **more: Any
    ) -> None:
        if betas[1] > 1.0 - 2.0 * _LOST_CHANGE:
            raise ValueError(
                f"betas[1] is {betas[1]}: in bfloat16, a second moment that changes by less than "
                "1/256 per step does not move; use at most 0.992, such as 0.95"
            )
        super().__init__(params, lr=lr, betas=betas, **more)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, parameter.grad, group)
        return loss

    def _step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        fused = bool(group["fused"])
        if "exp_avg" not in state:
            device = parameter.device if fused else torch.device("cpu")
            state["step"] = torch.tensor(0.0, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        flat = [t.view(-1) for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        step = step_fused if fused else _step_slices
        step(
            *(flat[0], gradient.reshape(-1), *flat[1:], state["step"]),
            *(float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]),
        )
        state["step"] += 1


def _step_slices(
    values: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    *numbers: float,
    fused: bool = False,
) -> None:
    """Step after `step` others with torch's own code, on slices with moments in float32.

    `numbers` are the learning rate, both betas, epsilon and the weight decay.
    """
    lr, beta1, beta2, eps, weight_decay = numbers
    tensors = (values, gradient, mean, square)
    for own, slope, low_mean, low_square in zip(
        *(torch.split(t, _SLICE) for t in tensors), strict=True
    ):
        means, squares = low_mean.to(own.dtype), low_square.to(own.dtype)
        adamw(
            *([own], [slope], [means], [squares], [], [step.clone()]),
            foreach=False,
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        low_mean.copy_(means)
        low_square.copy_(squares)


# A custom operation, so that what it reads and writes is counted once (`training measure`).
@torch.library.custom_op("training::step_fused", mutates_args=("values", "mean", "square"))
def step_fused(
    values: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Do the same as `_step_slices`; on a GPU, in one kernel."""
    given = (values, gradient, mean, square, step, lr, beta1, beta2, eps, weight_decay)
    if values.is_cuda and values.dtype == torch.float32:
        from training.workloads.growth.adamw_kernel import step_by_kernel

        step_by_kernel(*given)
    else:
        _step_slices(*given, fused=True)


@step_fused.register_fake
def _(*given: Any) -> None:
    """Return nothing, like the operation itself."""
