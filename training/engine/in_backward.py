"""The optimizer in backward: each parameter is updated with its gradient, which is freed at once.

It stays one optimizer, saved as always, but must treat every parameter by itself.
"""

import weakref

from torch import Tensor
from torch.optim import Optimizer


def step_in_backward(optimizer: Optimizer) -> None:
    """Let every backward step the optimizer, parameter by parameter."""
    # Weak: a parameter that held its optimizer would hold the whole stage after its end.
    of_all = weakref.ref(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda own, number=number: _step(of_all(), number, own)
                )


def _step(optimizer: Optimizer | None, number: int, parameter: Tensor) -> None:
    """Step the optimizer as if it had this parameter alone."""
    assert optimizer is not None
    groups = optimizer.param_groups
    group = groups[number]  # looked up here, as load_state_dict replaces the groups
    parameters = group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, group["params"] = groups, parameters
    parameter.grad = None
