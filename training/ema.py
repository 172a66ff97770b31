"""The exponential moving average of a model's parameters, and the swap that evaluates it."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class MovingAverage:
    """Averages parameters; buffers are taken from the model as they are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._parameters = dict(model.named_parameters())
        self.tensors = {name: p.detach().clone() for name, p in self._parameters.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what a checkpoint holds."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    def update(self) -> None:
        """After a step of the optimizer."""
        self._average(list(self.tensors.values()), list(self._parameters.values()), 0)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the average; nothing is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self.tensors[name] = self.tensors[name], parameter.data
