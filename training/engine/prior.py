"""The tensors of `Inputs.prior`: there until a stage has started, then their memory is free."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from training.errors import UserError
from training.workload import Inputs


class PriorTensors(Mapping[str, Tensor]):
    """A state_dict that whoever uses it does not keep in memory: it can be released."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors: Mapping[str, Tensor] | None = tensors

    def release(self) -> None:
        """Free the tensors; to read them from here on is a mistake of the workload."""
        self._tensors = None

    def __getitem__(self, name: str) -> Tensor:
        return self._there[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)

    @property
    def _there(self) -> Mapping[str, Tensor]:
        if self._tensors is None:
            raise UserError(
                "a stage reads the tensors of `prior` after its start, when their memory is free; "
                "let `start` put what is needed into the model, or a Prepare stage into shards"
            )
        return self._tensors


def release_prior(inputs: Inputs) -> None:
    """Free the tensors of the stage before, wherever these inputs are held."""
    if inputs.prior is not None and isinstance(inputs.prior.model, PriorTensors):
        inputs.prior.model.release()
