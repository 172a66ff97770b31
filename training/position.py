"""Where a run is: a step boundary without its tensors; and what an attempt's parts share."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training.config import Interval
from training.events import Events
from training.head import Lease
from training.interruption import InterruptedRunError, Interruption
from training.metrics import Metrics
from training.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A step boundary. `step` counts over all Train stages of the run, `stage_step` within one."""

    stage: str
    stage_step: int = 0
    step: int = 0
    has_ended: bool = False  # the stage is done; its metrics are final
    evaluated_step: int = 0  # stage_step of the last evaluation
    metrics: Mapping[str, float] = field(default_factory=dict)  # of that evaluation
    results: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of ended stages
    artifacts: Mapping[str, str] = field(default_factory=dict)  # Prepare stage -> key
    numerics_changed: tuple[str, ...] = ()  # parts of the key that some attempt changed

    def to_json(self) -> dict[str, Any]:
        """As kept in a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Position":
        """Read what `to_json` wrote."""
        return cls(**{**record, "numerics_changed": tuple(record["numerics_changed"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What the stages of one attempt write to and listen to."""

    store: Store
    lease: Lease
    metrics: Metrics
    events: Events
    interruption: Interruption
    interval: Interval
    scratch: Path

    @property
    def generation(self) -> int:
        """This attempt's number, from 1."""
        return self.lease.head.generation

    def check(self) -> None:
        """Raise if the attempt must end: called wherever ending loses nothing but time."""
        self.lease.check()
        notice = self.interruption.notice
        if notice is not None:
            left = round(notice.seconds_left, 3)
            self.events.emit("notice", cause=notice.cause, seconds_left=left)
            raise InterruptedRunError(notice.cause)
