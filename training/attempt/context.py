"""What the parts of one attempt share: where it writes, what it listens to, what it was told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.grammar import Interval
from training.attempt.consensus import Consensus
from training.attempt.notice import Interruption
from training.attempt.supervisor import Supervisor
from training.attempt.world import World
from training.record.events import Events
from training.record.lease import Lease
from training.record.metrics import Metrics
from training.record.retention import KEEP_NEWEST, Retention
from training.report.meter import Meter
from training.report.profiler import StepProfiler
from training.store.protocol import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptContext:
    """One attempt as its stages see it; ranks above 0 have no lease, and silent records."""

    store: Store
    own_lease: Lease | None
    metrics: Metrics
    events: Events
    supervisor: Supervisor
    interval: Interval
    retention: Retention = KEEP_NEWEST
    scratch: Path
    world: World
    meter: Meter = field(default_factory=Meter)
    profiler: StepProfiler | None = None
    artifacts: Store | None = None  # where runs share derived data
    numerics: Mapping[str, Any] = field(default_factory=dict)  # this machine's key
    keeps_compiled: bool = False  # in the store, for replacements
    consensus: Consensus = field(init=False)

    def __post_init__(self) -> None:
        consensus = Consensus(self.world, self.supervisor, self.own_lease, self.store, self.events)
        object.__setattr__(self, "consensus", consensus)

    @property
    def interruption(self) -> Interruption:
        """The notices and recommendations that this process has received."""
        return self.supervisor.interruption

    @property
    def lease(self) -> Lease:
        """The right of rank 0 to write the run's state."""
        assert self.own_lease is not None, "only rank 0 holds the lease"
        return self.own_lease

    def tell_take_over(self) -> None:
        """Write the event of a new generation, with the price that its report counts with."""
        price = self.meter.usd_per_hour
        known = {} if price is None else {"usd_per_hour": price}
        self.events.emit("take-over", "ok", generation=self.generation, **known)

    @property
    def generation(self) -> int:
        """This attempt's number, from 1."""
        return self.lease.head.generation
