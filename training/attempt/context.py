"""What the parts of one attempt share, and what its ranks decide together at step boundaries."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contract.grammar import Interval
from training.attempt.extra_time import Saves
from training.attempt.long_work import Work
from training.attempt.notice import InterruptedRunError, Interruption, Notice
from training.attempt.supervisor import Supervisor
from training.attempt.world import SHARES, World
from training.errors import DivergedError, Divergence, GoBackError
from training.record.checkpoint_entry import KEEP_NEWEST, Retention
from training.record.events import Events
from training.record.lease import Lease, LeaseLostError
from training.record.metrics import Metrics
from training.report.profiler import StepProfiler
from training.store.protocol import Store

# As many numbers as a step has shares.
NO_WEIGHTS = (0.0,) * SHARES


class _Vote(NamedTuple):
    """What all ranks have agreed on at a boundary."""

    weights: Sequence[float]  # by share, of all ranks
    is_noticed: bool  # a notice or shutdown has come, to any rank
    must_stop: bool  # and no time is left for the work in progress


class Consensus:
    """Agreement to stop or to continue; only rank 0 has a lease.

    Every method is called by all ranks in the same order. A single process decides alone.
    """

    def __init__(
        self,
        world: World,
        supervisor: Supervisor,
        lease: Lease | None,
        store: Store,
        events: Events,
    ) -> None:
        self._world = world
        self._supervisor = supervisor
        self._lease = lease
        self._store = store
        self._events = events
        self._is_notice_taken = False
        self._divergence: Divergence | None = None  # that this rank has found

    def begin_vote(self, weights: Sequence[float] = NO_WEIGHTS) -> None:
        """Ask the other ranks ahead of a step boundary, and tell them the weights of one's shares.

        Others have 0 there, so no order of the ranks changes the sums.
        """
        self._supervisor.watchdog.beat()
        is_lost = self._lease is not None and self._lease.lost.is_set()
        # Rank 0 saves, so it must learn of a recommendation to another machine's rank.
        interruption, extra_time = self._supervisor.interruption, self._supervisor.extra_time
        rebalance = not self._world.leads and interruption.take_rebalance()
        has_diverged = self._divergence is not None
        self._world.begin_sum([extra_time.must_stop, is_lost, has_diverged, rebalance, *weights])

    def end_vote(self) -> _Vote:
        """The result at the boundary; LeaseLostError or GoBackError if a rank has reason for it."""
        must_stop, is_lost, has_diverged, rebalance, *weights = self._world.end_sum()
        if self._world.size == 1:
            # Nobody had to be asked ahead: what came in the meantime counts too.
            must_stop = self._supervisor.extra_time.must_stop
            has_diverged = self._divergence is not None
            if self._lease is not None:
                self._lease.check()
        if rebalance and self._world.leads:
            self._supervisor.interruption.recommend_rebalance()
        if is_lost:
            raise LeaseLostError(f"{self._store.uri} was taken over by another writer")
        if has_diverged:
            divergence, self._divergence = self._divergence, None
            raise GoBackError(divergence)
        is_noticed = bool(must_stop) or self._supervisor.extra_time.is_granted
        return _Vote(weights, is_noticed, bool(must_stop))

    @contextlib.contextmanager
    def noting_divergence(self) -> Iterator[None]:
        """What is found in here, perhaps by this rank alone, ends training at the next vote."""
        try:
            yield
        except DivergedError as error:
            # Not the error: its traceback holds the model. The first one is the telling one.
            self._divergence = self._divergence or error.divergence

    def refuse_diverged(self) -> None:
        """DivergedError if one was noted: a state past it may look good, but is not to be saved."""
        if self._divergence is not None:
            raise DivergedError(self._divergence)

    def go_back_if_diverged(self) -> None:
        """Vote at once: what follows is expensive, or cannot be undone."""
        self.begin_vote()
        self.end_vote()

    def stop_if_due(self, *, may_use_extra_time: bool = False) -> None:
        """Raise InterruptedRunError if the attempt must stop; call where that loses only time.

        In the extra time of a notice only work that was started with it in mind continues.
        """
        self.begin_vote()
        vote = self.end_vote()
        if vote.must_stop or (vote.is_noticed and not may_use_extra_time):
            raise InterruptedRunError(self.take_notice().cause)

    def stop_unless_time_for(self, work: Work) -> None:
        """As `stop_if_due`, but continue if `work`, which commits by itself, still fits."""
        self.begin_vote()
        if self.end_vote().is_noticed:
            seconds = self._supervisor.long_work.measured_seconds(work)
            self._supervisor.extra_time.answer(self, seconds, Saves())

    def all_agree(self, is_in_favor: bool) -> bool:
        """Whether every rank is in favor."""
        return all(self._world.gather(is_in_favor))

    def take_notice(self) -> Notice:
        """The notice, for the main thread to answer in place of the last resort.

        The first call writes the event.
        """
        self._supervisor.last_resort.stand_down()
        self._supervisor.interruption.tell("notice")  # no-op unless only another rank has it
        notice = self._supervisor.interruption.notice
        assert notice is not None
        if not self._is_notice_taken:
            self._is_notice_taken = True
            left = round(notice.seconds_left, 3)
            self._events.emit("notice", cause=notice.cause, seconds_left=left)
        return notice

    def leave_to_last_resort(self, notice: Notice) -> None:
        """Have the last resort watch again: it stops what takes longer than the notice."""
        self._supervisor.last_resort.watch_again(notice)


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
