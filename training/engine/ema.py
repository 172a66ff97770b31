"""The exponential moving average of a model's parameters, swapped in for evaluation."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from training.checkpoint.slices import is_sharded


class MovingAverage:
    """Averages parameters; buffers are used as they are in the model."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._parameters = list(model.parameters())
        self._averages = [parameter.detach().clone() for parameter in self._parameters]
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        # A shared parameter under each of its names, as in the model's state_dict.
        self._places = {
            name: places[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return {name: self._averages[place] for name, place in self._places.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the averages of a checkpoint."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    def update(self) -> None:
        """Update the averages after an optimizer step."""
        self._average(self._averages, self._parameters, 0)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model compute with the averages; only sharded parameters are copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for place, parameter in enumerate(self._parameters):
            average = self._averages[place]
            if is_sharded(parameter):
                # FSDP gathers from its own memory, of which the parameter is a view.
                mine, other = parameter.detach().to_local(), average.to_local()  # type: ignore[attr-defined]
                before = mine.clone()
                mine.copy_(other)
                other.copy_(before)
            else:
                parameter.data, self._averages[place] = average, parameter.data
