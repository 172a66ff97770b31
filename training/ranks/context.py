"""Where a run is: a step boundary without its tensors; and what an attempt's parts share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from contract.grammar import Interval
from training.interruption.extra_time import ExtraTime, watch_for_candidates
from training.interruption.long_work import Work
from training.interruption.notice import InterruptedRunError, Interruption, Notice
from training.interruption.supervisor import Supervisor
from training.ranks.world import World
from training.record.events import Events
from training.record.lease import Lease, LeaseLostError
from training.record.metrics import Metrics
from training.record.retention import KEEP_NEWEST, Retention
from training.report.meter import Meter
from training.report.profiler import StepProfiler
from training.store.protocol import Store


class Checked(NamedTuple):
    """What all ranks have agreed upon at a boundary."""

    weight: float  # the sum of theirs
    must_end: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What the stages of one attempt write to and listen to; only rank 0 holds a lease."""

    store: Store
    held: Lease | None
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

    @property
    def interruption(self) -> Interruption:
        """The notices and recommendations that this process has received."""
        return self.supervisor.interruption

    @property
    def extra_time(self) -> ExtraTime:
        """What is left of a notice after its first commit."""
        return self.supervisor.extra_time

    @property
    def lease(self) -> Lease:
        """Rank 0's right to write the run's state."""
        assert self.held is not None, "only rank 0 holds the lease"
        return self.held

    @property
    def generation(self) -> int:
        """This attempt's number, from 1."""
        return self.lease.head.generation

    def check(self, *, may_use_extra_time: bool = False) -> None:
        """Raise, on all ranks alike, if the attempt must end: where that loses nothing but time.

        In the extra time of a notice only what was begun in the knowledge of it goes on.
        """
        self.begin_check()
        must_end = self.end_check().must_end
        if must_end or (self.extra_time.is_granted and not may_use_extra_time):
            raise InterruptedRunError(self.hear_notice().cause)

    def check_before(self, work: Work) -> None:
        """Raise as `check`, unless `work`, which commits by itself, would still end in time."""
        self.begin_check()
        if not self.end_check().must_end and not self.extra_time.is_granted:
            return
        seconds = self.supervisor.long_work.measured_seconds(work)
        is_first = not self.extra_time.is_granted
        notice = self.hear_notice() if is_first else None
        if not self.agree(self.extra_time.would_allow(seconds, 0.0)):
            raise InterruptedRunError(self.hear_notice().cause)
        if notice is not None:
            print(f"[notice] {notice.seconds_left:.0f} s left: {work} after {work}", flush=True)
            self.go_on(notice, 0.0)

    def agree(self, may_go_on: bool) -> bool:
        """Whether every rank says so."""
        return all(self.world.gather(may_go_on))

    def go_on(self, notice: Notice, save_seconds: float) -> None:
        """Use the time that is left; the last resort ends what takes longer."""
        self.extra_time.grant(save_seconds)
        self.supervisor.last_resort.watch_on(notice)
        if self.held is not None:
            watch_for_candidates(self.store, self.generation, self.extra_time)

    def hear_notice(self) -> Notice:
        """The notice, which the main thread answers now; the first time it becomes an event."""
        self.supervisor.last_resort.stand_down()
        self.interruption.tell("notice")  # no-op unless another rank has it alone
        notice = self.interruption.notice
        assert notice is not None
        if not self.extra_time.is_heard:
            self.extra_time.is_heard = True
            left = round(notice.seconds_left, 3)
            self.events.emit("notice", cause=notice.cause, seconds_left=left)
        return notice

    def begin_check(self, weight: float = 0.0) -> None:
        """Ask the other ranks ahead of a step boundary; `weight` is added up over the ranks."""
        self.supervisor.watchdog.beat()
        is_lost = self.held is not None and self.held.lost.is_set()
        # Rank 0 saves, so it must hear of what another machine's rank was recommended.
        rebalance = not self.world.leads and self.interruption.take_rebalance()
        self.world.begin_sum([self.extra_time.must_end, is_lost, rebalance, weight])

    def end_check(self) -> Checked:
        """At the boundary: raise if the lease is lost; say whether the attempt must end."""
        must_end, is_lost, rebalance, weight = self.world.end_sum()
        if self.world.size == 1:
            # Nobody had to be asked ahead: what came in the meantime counts too.
            must_end = self.extra_time.must_end
            self.lease.check()
        if rebalance and self.world.leads:
            self.interruption.recommend_rebalance()
        if is_lost:
            raise LeaseLostError(f"{self.store.uri} was taken over by another writer")
        return Checked(weight, bool(must_end))
