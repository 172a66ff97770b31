"""What a run begins from, if not from nothing: the weights of another one, or its whole end.

It stands in config.json, so a replacement machine needs to be told nothing, and it is applied by
wrapping the workload: the loop knows nothing of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from training.checkpoint.weights import load_weights, read_weights
from training.errors import RunFailedError, UserError
from training.proxies import TrainProxy, WorkloadProxy
from training.workload import Inputs, Prepare, Samples, Settings, Start, Train, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """As in config.json. `epochs` and `dataset` are those of an extended run."""

    uri: str
    weights_sha256: str
    stage: str  # that the weights go into, or that is extended
    epochs: int | None = None  # at the end of the stage; None: only weights are taken
    dataset: str | None = None  # fingerprint: the steps of another one would be others

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Origin":
        """Read what asdict wrote."""
        return cls(**record)


def begins_from_weights(uri: str, workload: Workload[Any], config: Any) -> Origin:
    """Weights of a file or finished run, for the stage of the same name or else the first one."""
    weights = read_weights(uri)
    names = [stage.name for stage in workload.stages(config) if isinstance(stage, Train)]
    stage = weights.about.get("stage", "")
    return Origin(
        uri=uri,
        weights_sha256=weights.sha256,
        stage=stage if stage in names else names[0],
    )


def beginning_from(workload: Workload[Any], origin: Origin) -> Workload[Any]:
    """The workload as it trains from that origin."""
    return cast(Workload[Any], _Beginning(workload, origin))


class _Beginning(WorkloadProxy):
    def __init__(self, inner: Workload[Any], origin: Origin) -> None:
        super().__init__(inner)
        self._origin = origin

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        kind = _FromWeights if self._origin.epochs is None else _Extended
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
        """After the stage's own start, which may look at data or at what trained before."""
        start = super().start(m, i)
        if not start.failures:
            weights = read_weights(self._origin.uri)
            if weights.sha256 != self._origin.weights_sha256:
                raise RunFailedError(
                    f"the weights at {self._origin.uri} are no longer those that this run was "
                    "begun with; begin a new run"
                )
            load_weights(m, weights, self.name)
            print(f"[{self.name}] begins with the weights of {self._origin.uri}", flush=True)
        return start


class _Extended(TrainProxy):
    def __init__(self, inner: Train, origin: Origin) -> None:
        super().__init__(inner)
        self._origin = origin

    @property
    def settings(self) -> Settings:
        assert self._origin.epochs is not None
        return replace(self._inner.settings, epochs=self._origin.epochs)

    def samples(self, i: Inputs, split: str) -> Samples:
        if i.dataset.fingerprint != self._origin.dataset:
            raise UserError(
                f"the run {self._origin.uri} was trained on another dataset; extend it on the "
                "same one, or begin from its weights without --extend-to"
            )
        return super().samples(i, split)
