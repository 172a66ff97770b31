"""Where a run is: a step boundary without its tensors; and what an attempt's parts share."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training.config import Interval
from training.distributed import World
from training.events import Events
from training.head import Lease, LeaseLostError
from training.interruption import InterruptedRunError, Interruption
from training.meter import Meter
from training.metrics import Metrics
from training.oversight import Oversight
from training.profiler import StepProfiler
from training.retention import KEEP_NEWEST, Retention
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
    best: Mapping[str, float] = field(default_factory=dict)  # step and value of the best metric
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
    """What the stages of one attempt write to and listen to; only rank 0 holds a lease."""

    store: Store
    held: Lease | None
    metrics: Metrics
    events: Events
    oversight: Oversight
    interval: Interval
    retention: Retention = KEEP_NEWEST
    scratch: Path
    world: World
    meter: Meter = field(default_factory=Meter)
    profiler: StepProfiler | None = None
    artifacts: Store | None = None  # where runs share derived data
    numerics: Mapping[str, Any] = field(default_factory=dict)  # this machine's key

    @property
    def interruption(self) -> Interruption:
        """The notices and recommendations that this process has received."""
        return self.oversight.interruption

    @property
    def lease(self) -> Lease:
        """Rank 0's right to write the run's state."""
        assert self.held is not None, "only rank 0 holds the lease"
        return self.held

    @property
    def generation(self) -> int:
        """This attempt's number, from 1."""
        return self.lease.head.generation

    def check(self) -> None:
        """Raise, on all ranks alike, if the attempt must end: where that loses nothing but time."""
        self.begin_check()
        self.end_check()

    def begin_check(self, weight: float = 0.0) -> None:
        """Ask the other ranks ahead of a step boundary; `weight` is added up over the ranks."""
        self.oversight.watchdog.beat()
        is_lost = self.held is not None and self.held.lost.is_set()
        # Rank 0 saves, so it must hear of what another machine's rank was recommended.
        rebalance = not self.world.leads and self.interruption.take_rebalance()
        self.world.begin_sum([self.interruption.is_pending, is_lost, rebalance, weight])

    def end_check(self) -> float:
        """At the boundary: raise if the attempt must end; return the sum of the weights."""
        is_pending, is_lost, rebalance, weight = self.world.end_sum()
        if self.world.size == 1:
            # Nobody had to be asked ahead: what came in the meantime counts too.
            is_pending = self.interruption.is_pending
            self.lease.check()
        if rebalance and self.world.leads:
            self.interruption.recommend_rebalance()
        if is_lost:
            raise LeaseLostError(f"{self.store.uri} was taken over by another writer")
        if is_pending:
            self.oversight.guardian.stand_down()
            self.interruption.tell("notice")  # no-op unless another rank has it alone
            notice = self.interruption.notice
            assert notice is not None
            left = round(notice.seconds_left, 3)
            self.events.emit("notice", cause=notice.cause, seconds_left=left)
            raise InterruptedRunError(notice.cause)
        return weight
