"""One job replayed on the lives of Spot machines: on Spot alone, or with a deadline on a fleet.

The fleet itself requests Spot, at once; the Guard, if there is one, decides only at ticks and when
an event of a machine wakes it. Two machines may run for a while, and both are paid for.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sizing.fallback.decision import (
    Market,
    Place,
    Situation,
    SpotHistory,
    decide_market,
    observe_market,
)
from sizing.spot.interruptions import SpotLife
from sizing.spot.pattern import NOTICE_SECONDS

# A schedule of one minute fires at any moment of its minute.
_JITTER_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayJob:
    """Useful seconds to do, the deadline from its start (possibly infinite), and overheads.

    `restart` is a machine's start, `first` that of one with nothing to restore (None: as long).
    `checkpoint` is how long a periodic save, every `interval` useful seconds, blocks the GPU,
    `save` the time of a commit before a move. `notice_idle` is the part of the notice without
    training: all of it if the trainer stops at the notice, else the seconds reserved for saves;
    None: notices are ignored.
    """

    work: float
    deadline: float = math.inf
    restart: float
    first: float | None = None
    checkpoint: float = 0.0
    save: float = 0.0
    interval: float
    notice_idle: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Dollars per hour."""

    spot: float
    on_demand: float


@dataclass(slots=True)
class ReplayOutcome:
    """The outcome of a job: paid seconds by market, seconds by the clock, and the work done."""

    spot: float = 0.0
    on_demand: float = 0.0
    seconds: float = 0.0
    losses: int = 0
    is_done: bool = False
    useful: float = 0.0

    def usd(self, prices: Prices) -> float:
        """Return the dollars that the machines cost."""
        return (self.spot * prices.spot + self.on_demand * prices.on_demand) / 3600

    def is_done_by(self, hours: float) -> bool:
        """Return whether the job was done within `hours`, to the second."""
        return self.is_done and self.seconds <= hours * 3600 + 1


@dataclass(slots=True)
class ReplayedMachine:
    """A machine that is paid for; it trains from `trains` on, if at all."""

    place: Place
    launched: float
    gone: float = math.inf
    stops: float = math.inf
    name: str = ""
    trains: float = math.inf
    base: float = 0.0

    def trained(self, now: float, job: ReplayJob) -> float:
        """Return the seconds of work done here by `now`."""
        seconds = max(0.0, min(now, self.stops) - self.trains)
        period = job.interval + job.checkpoint
        whole = math.floor(seconds / period)
        return whole * job.interval + min(seconds - whole * period, job.interval)

    def done_at(self, job: ReplayJob) -> float:
        """Return when the job is done here if nothing happens before that."""
        left = job.work - self.base
        saves = max(0, math.ceil(left / job.interval) - 1)
        time = self.trains + left + saves * job.checkpoint
        return time if time <= self.stops else math.inf


@dataclass(kw_only=True, slots=True)
class Replay:
    """A job from second 0 until it is done or the horizon is reached.

    At most one machine of each market is up, and one of them trains. `has_notice` says which lives
    end with a notice. With `fallback`, the prices for its decisions, the Guard decides where the
    job runs, every `tick` seconds and at a share `wakes` of machine events: EventBridge delivers
    events within seconds, but promises nothing. Without it, the job runs on Spot alone.
    """

    lives: Sequence[SpotLife]
    job: ReplayJob
    horizon: float
    has_notice: Sequence[bool]
    fallback: Prices | None = None
    tick: float = 120.0
    wakes: float = 0.95

    now: float = field(default=0.0, init=False)
    index: int = field(default=0, init=False)
    committed: float = field(default=0.0, init=False)
    spot: ReplayedMachine | None = field(default=None, init=False)
    demand: ReplayedMachine | None = field(default=None, init=False)
    trainer: ReplayedMachine | None = field(default=None, init=False)
    asks: bool = field(default=True, init=False)
    next_tick: float = field(init=False)
    luck: random.Random = field(init=False)
    history: SpotHistory = field(default_factory=SpotHistory, init=False)
    outcome: ReplayOutcome = field(default_factory=ReplayOutcome, init=False)

    def run(self) -> ReplayOutcome:
        """Step from event to event until the end."""
        self.luck = random.Random(len(self.lives))
        self.next_tick = math.inf if self.fallback is None else 0.0
        while self.now < self.horizon and not self.outcome.is_done:
            self._start_spot()
            if self.fallback is not None and self.now >= self.next_tick:
                self.next_tick = self.now + self.tick
                self._apply(self._decide(self.fallback))
                self._start_spot()
            done = self.trainer.done_at(self.job) if self.trainer else math.inf
            gone = self.spot.gone if self.spot else math.inf
            comes = self._next_start()
            self.now = max(self.now, min(done, gone, comes, self.next_tick, self.horizon))
            if done <= self.now:
                self.outcome.is_done = True
            elif gone <= self.now:
                self._lose_spot()
        if self.trainer is not None:
            self._stop_training(self.trainer, is_kept=True)
        self._end(self.spot)
        self._end(self.demand)
        self.outcome.seconds = self.now
        return self.outcome

    def _next_start(self) -> float:
        """Return when the fleet's request for Spot is next fulfilled."""
        if not self.asks or self.spot is not None:
            return math.inf
        while self.index < len(self.lives) and self.lives[self.index].end <= self.now:
            self.index += 1
        return self.lives[self.index].start if self.index < len(self.lives) else math.inf

    def _start_spot(self) -> None:
        """Start the Spot machine that the fleet requests, if one is available now."""
        if self._next_start() > self.now:
            return
        life, idle = self.lives[self.index], self.job.notice_idle
        is_warned = idle is not None and self.has_notice[self.index]
        stops = max(self.now, life.end - (idle or 0.0)) if is_warned else life.end
        self.spot = ReplayedMachine(
            place="spot", launched=self.now, gone=life.end, stops=stops, name=str(self.index)
        )
        if self.trainer is None:
            self._hand_over(self.spot)
        self._wake()

    def _hand_over(self, machine: ReplayedMachine, *, released: float = 0.0) -> None:
        """Let a machine train as soon as it has booted and the lease is free."""
        job = self.job
        start = job.restart if self.committed or job.first is None else job.first
        machine.trains = max(machine.launched + start, self.now, released)
        machine.base = self.committed
        self.trainer = machine

    def _lose_spot(self) -> None:
        machine = self.spot
        assert machine is not None
        self.spot = None
        self._end(machine)
        self.outcome.losses += 1
        if self.trainer is machine:
            # A trainer that stops before its machine is gone had a notice and saved.
            self._stop_training(machine, is_kept=machine.stops < machine.gone)
            if self.demand is not None:
                self._hand_over(self.demand)
        self._wake()

    def _stop_training(self, machine: ReplayedMachine, *, is_kept: bool) -> None:
        """Count the trainer's work; unsaved work is lost unless `is_kept`."""
        kept = machine.trained(self.now, self.job)
        if not is_kept:
            kept = min(math.floor(kept / self.job.interval) * self.job.interval, kept)
        self.outcome.useful += kept
        self.committed = machine.base + kept
        self.trainer = None

    def _wake(self) -> None:
        if self.fallback is not None and self.luck.random() < self.wakes:
            self.next_tick = self.now

    def _end(self, machine: ReplayedMachine | None) -> None:
        """Bill a machine that ends now."""
        if machine is None:
            return
        seconds = max(0.0, self.now - machine.launched)
        if machine.place == "spot":
            self.outcome.spot += seconds
        else:
            self.outcome.on_demand += seconds

    def _decide(self, prices: Prices) -> Market:
        """Observe Spot since the last decision, and decide as the Guard does."""
        trainer, job = self.trainer, self.job
        done = trainer.trained(self.now, job) if trainer else 0.0
        whole = done // job.interval * job.interval
        start = trainer.base if trainer else self.committed
        situation = Situation(
            now=self.now,
            deadline=job.deadline,
            work=self._with_saves(job.work),
            left=self._with_saves(job.work - start - done),
            committed_left=self._with_saves(job.work - start - whole),
            place=trainer.place if trainer else "none",
            spot_machine=self.spot.name if self.spot else None,
            asks_for_spot=self.asks,
            restart=job.restart,
            save=job.save,
            interval=job.interval,
            until_next=self.tick + _JITTER_SECONDS,
            spot_per_hour=prices.spot,
            on_demand_per_hour=prices.on_demand,
        )
        self.history = observe_market(
            self.history, seconds=self.now, machine=situation.spot_machine, asks=self.asks
        )
        return decide_market(situation, self.history).market

    def _with_saves(self, work: float) -> float:
        return work + math.ceil(work / self.job.interval) * self.job.checkpoint

    def _apply(self, market: Market) -> None:
        if market == "on-demand":
            self._hold()
        else:
            self.asks = True
            if market == "spot":
                self._leave_demand()
            elif self.trainer is None:
                self._start_demand()

    def _start_demand(self) -> None:
        self.demand = ReplayedMachine(place="on-demand", launched=self.now)
        if self.trainer is None:
            self._hand_over(self.demand)

    def _leave_demand(self) -> None:
        """Terminate the on-demand machine: it commits, and Spot continues, now or when it comes."""
        machine, self.demand = self.demand, None
        if machine is None:
            return
        self._end(machine)
        if self.trainer is not machine:
            return
        saving = self.job.save if machine.trained(self.now, self.job) else 0.0
        self._stop_training(machine, is_kept=True)
        self.outcome.on_demand += saving
        if self.spot is not None:
            self._hand_over(self.spot, released=self.now + saving)

    def _hold(self) -> None:
        """Stop requesting Spot; a Spot machine that is training continues until its notice ends."""
        self.asks = False
        if self.demand is None:
            self._start_demand()
        spot = self.spot
        if spot is None:
            return
        if self.trainer is spot:
            gone = self.now + NOTICE_SECONDS
            if gone < spot.gone:
                spot.gone, spot.stops = gone, min(spot.stops, gone - (self.job.notice_idle or 0.0))
        else:
            self._end(spot)
            self.spot = None
