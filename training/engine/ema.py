"""The exponential moving average of a model's parameters, and the swap that evaluates it."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from training.checkpoint.slices import is_sharded


class MovingAverage:
    """Averages parameters; buffers are taken from the model as they are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._parameters = list(model.parameters())
        self._averages = [parameter.detach().clone() for parameter in self._parameters]
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        # Every name of a parameter that has several, as in the model's state_dict.
        self._places = {
            name: places[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages by the parameters' names."""
        return {name: self._averages[place] for name, place in self._places.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what a checkpoint holds."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    def update(self) -> None:
        """After a step of the optimizer."""
        self._average(self._averages, self._parameters, 0)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the average; nothing is copied but shares of sharded ones."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for place, parameter in enumerate(self._parameters):
            average = self._averages[place]
            if is_sharded(parameter):
                # FSDP gathers from memory of its own, of which the parameter is a view.
                mine, other = parameter.detach().to_local(), average.to_local()  # type: ignore[attr-defined]
                before = mine.clone()
                mine.copy_(other)
                other.copy_(before)
            else:
                parameter.data, self._averages[place] = average, parameter.data
