"""What the parts of one attempt share: where it writes, what it listens to, what it was told."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from contract.grammar import Interval
from training.attempt.consensus import Consensus
from training.attempt.notice import Interruption
from training.attempt.supervisor import Supervisor
from training.attempt.world import World
from training.record.events import Events
from training.record.lease import Lease
from training.record.metrics import Metrics
from training.record.retention import KEEP_NEWEST, Retention
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
    usd_per_hour: float | None = None
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

    @property
    def generation(self) -> int:
        """This attempt's number, from 1."""
        return self.lease.head.generation

    def meter_text(self) -> str:
        """GPU memory if there is a GPU, dollars if there is a price; starts with a comma."""
        parts = []
        if torch.cuda.is_available():
            parts.append(f"GPU memory peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        if (price := self.usd_per_hour) is not None:
            dollars = (time.monotonic() - self.supervisor.began) / 3600 * price
            parts.append(f"{dollars:.4f} dollars so far (this attempt, {price:g}/h)")
        return "".join(f", {part}" for part in parts)
