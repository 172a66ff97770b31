"""AdamW with both moments in bfloat16: 4 bytes a parameter instead of 8; and what decays.

The moments are rounded to nearest once a step, after torch's own AdamW has computed with them in
float32, so nothing random has to be saved. The price: a moment that should change by less than
1/256 of itself stays where it is, which is why a slow second moment is refused.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

# Elements that are widened at a time: 128 MiB for both moments, whatever the parameter's size.
_SLICE = 2**24
# Of bfloat16: the largest change of a number, relative to it, that rounding may lose.
_LOST_CHANGE = 2.0**-8


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Matrices and the embedding decay; biases, those of experts (E, outputs) too, norms do not."""
    return not name.endswith("bias") and "norm" not in name


class BFloat16AdamW(AdamW):
    """torch's AdamW, whose state has the same names, with `exp_avg` and `exp_avg_sq` in bfloat16.

    It takes AdamW's arguments but `amsgrad`, and no scaled gradients (float16). `betas[1]` must
    forget at least 1/128 a step (0.95 is usual for language models; torch's default of 0.999 would
    only ever let the second moment grow).
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), **more: Any
    ) -> None:
        if betas[1] > 1.0 - 2.0 * _LOST_CHANGE:
            raise ValueError(
                f"betas[1] is {betas[1]}: in bfloat16 a second moment that changes by less than "
                "1/256 a step stays where it is; give at most 0.992, such as 0.95"
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
        slices = [torch.split(tensor, _SLICE) for tensor in (*flat, gradient.reshape(-1))]
        for values, mean, square, own in zip(*slices, strict=True):
            means, squares = mean.to(values.dtype), square.to(values.dtype)
            adamw(
                [values],
                [own],
                [means],
                [squares],
                [],
                [state["step"].clone()],
                foreach=False,
                fused=fused,
                amsgrad=False,
                beta1=cast(float, group["betas"][0]),
                beta2=cast(float, group["betas"][1]),
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )
            mean.copy_(means)
            square.copy_(squares)
        state["step"] += 1
