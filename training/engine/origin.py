"""The origin of a run that does not start from scratch: another run's weights, or its final state.

It is recorded in config.json, so a replacement machine needs no options for it, and is applied by a
proxy of the workload: the loop does not know of it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from training.errors import RunFailedError, UserError
from training.proxies import TrainProxy, WorkloadProxy
from training.save.weights import load_weights, read_weights
from training.workload import Inputs, Prepare, Samples, Settings, Start, Train, Workload

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """An origin as in config.json; only an extended run has a length and `dataset`."""

    uri: str
    weights_sha256: str
    stage: str  # the stage that gets the weights, or is extended
    # Of the extended stage in total, in one of the two; without both only weights are taken.
    epochs: int | None = None
    steps: int | None = None
    dataset: str | None = None  # its fingerprint: with another one, steps would differ

    @property
    def extends(self) -> bool:
        """Whether it is a run's final state, to train on from, and not only its weights."""
        return self.epochs is not None or self.steps is not None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Origin":
        """Rebuild from what `asdict` returned."""
        return cls(**record)


def origin_from_weights(uri: str, workload: Workload[Any], config: Any) -> Origin:
    """Weights of a file or finished run, for the stage they came from or else the first one."""
    weights = read_weights(uri)
    names = [stage.name for stage in workload.stages(config) if isinstance(stage, Train)]
    stage = weights.about.get("stage", "")
    return Origin(
        uri=uri,
        weights_sha256=weights.sha256,
        stage=stage if stage in names else names[0],
    )


def with_origin(workload: Workload[Any], origin: Origin) -> Workload[Any]:
    """A proxy of the workload that trains from that origin."""
    return cast(Workload[Any], _WithOrigin(workload, origin))


class _WithOrigin(WorkloadProxy):
    def __init__(self, inner: Workload[Any], origin: Origin) -> None:
        super().__init__(inner)
        self._origin = origin

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        kind = _Extended if self._origin.extends else _FromWeights
        return [
            kind(stage, self._origin)
            if isinstance(stage, Train) and stage.name == self._origin.stage
            else stage
            for stage in self._inner.stages(c)
        ]


class _FromWeights(TrainProxy):
    def __init__(self, inner: Train, origin: Origin) -> None:
        super().__init__(inner)
        self._origin = origin

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Load the weights after the stage's own start, which may read data or `prior`."""
        start = super().start(m, replace(i, is_given_weights=True))
        if not start.failures:
            weights = read_weights(self._origin.uri)
            if weights.sha256 != self._origin.weights_sha256:
                raise RunFailedError(
                    f"the weights at {self._origin.uri} are not those that this run started with; "
                    "start a new run"
                )
            load_weights(m, weights, self.name)
            _log.info(f"[{self.name}] starts with the weights of {self._origin.uri}")
        return start


class _Extended(TrainProxy):
    def __init__(self, inner: Train, origin: Origin) -> None:
        super().__init__(inner)
        self._origin = origin

    @property
    def settings(self) -> Settings:
        origin = self._origin
        return replace(self._inner.settings, epochs=origin.epochs, steps=origin.steps)

    def samples(self, i: Inputs, split: str) -> Samples:
        if i.dataset.fingerprint != self._origin.dataset:
            raise UserError(
                f"the run {self._origin.uri} was trained on another dataset; extend it on the "
                "same one, or start from its weights without --extend-to"
            )
        return super().samples(i, split)
