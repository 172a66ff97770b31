"""The exponential moving average of a model, swapped in for evaluation."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from training.save.slices import is_sharded


class MovingAverage:
    """Averages parameters, and floating-point buffers if asked; the rest is as in the model."""

    def __init__(self, model: nn.Module, decay: float, *, with_buffers: bool = False) -> None:
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        if with_buffers:
            saved = model.state_dict().keys()
            for name, buffer in model.named_buffers(remove_duplicate=False):
                if name in saved and buffer.is_floating_point():
                    named[name] = buffer
        unique = {id(tensor): tensor for tensor in named.values()}
        self._tensors = list(unique.values())
        self._averages = [tensor.detach().clone() for tensor in self._tensors]
        places = {number: place for place, number in enumerate(unique)}
        # A shared tensor under each of its names, as in the model's state_dict.
        self._places = {name: places[id(tensor)] for name, tensor in named.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages by name."""
        return {name: self._averages[place] for name, place in self._places.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the averages of a checkpoint."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    def update(self) -> None:
        """Update the averages after an optimizer step."""
        self._average(self._averages, self._tensors, 0)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model compute with the averages; only sharded parameters are copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for place, tensor in enumerate(self._tensors):
            average = self._averages[place]
            if is_sharded(tensor):
                # FSDP gathers from its own memory, of which the parameter is a view.
                mine, other = tensor.detach().to_local(), average.to_local()  # type: ignore[attr-defined]
                before = mine.clone()
                mine.copy_(other)
                other.copy_(before)
            else:
                tensor.data, self._averages[place] = average, tensor.data
