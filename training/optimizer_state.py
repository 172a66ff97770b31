"""An optimizer's state before its first real step, so that a checkpoint can be filled into it."""

import torch
from torch.optim import Optimizer


def make_state(optimizer: Optimizer) -> None:
    """Have it make all state that a step makes, as it would; values, and weights', are no good.

    By a step without gradients: what state there is, and how it is sharded, is the optimizer's own.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
