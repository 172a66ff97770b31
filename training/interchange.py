"""Weights of other libraries: which of their names a stage reads, and in which form it writes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

# Writes a model, with its weights, to a new file or folder.
Writer: TypeAlias = Callable[[nn.Module, Path], None]


class Interchange:
    """What a Train stage knows of other libraries; by default nothing."""

    def from_foreign(
        self, m: nn.Module, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor] | None:
        """The tensors of another library (`--init-from`) as the state of `m`; None: not of one."""
        return None

    def formats(self) -> Mapping[str, Writer]:
        """The forms in which others read the model (`export --format`)."""
        return {}
