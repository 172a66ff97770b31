"""Lower precision: autocast, and float16's loss scaler, whose state is in the checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from training.settings import Precision

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Scaling:
    """Scales the loss so that float16 gradients do not underflow; no-op for other precisions.

    A step whose gradients overflow is skipped: weights and optimizer stay, the scale is lowered.
    It is a step of the lineage like any other, and is repeated as such after an interruption.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._scaler = GradScaler(device.type, enabled=precision == "float16")

    def backward(self, loss: Tensor) -> None:
        """Backpropagate the scaled loss."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(
        self, optimizer: Optimizer, model: nn.Module, clip_norm: float | None
    ) -> tuple[bool, Tensor | None]:
        """Clip gradients, step, adapt the scale.

        Return whether the step was skipped, and the norm of the gradients if they are clipped:
        then it is known anyway, otherwise it would cost another pass over them.
        """
        norm: Tensor | None = None
        if clip_norm is not None:
            self._scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if not self._scaler.is_enabled():
            optimizer.step()
            return False, norm
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return self._scaler.get_scale() < before, norm

    def state(self) -> dict[str, Any]:
        """The state to keep in a checkpoint; empty if the loss is not scaled."""
        return self._scaler.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(state))


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The autocast context for every forward."""
    return torch.autocast(
        device.type, dtype=_DTYPES[precision], enabled=precision != "float32", cache_enabled=True
    )
