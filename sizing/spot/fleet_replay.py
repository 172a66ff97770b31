"""One job with a deadline replayed on a fleet whose market is decided at ticks, as the Guard does.

Spot is asked for by the fleet itself, at once; a policy decides only at ticks, and when an event of
a machine wakes it. Two machines may run for a while, and both are paid for.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sizing.fallback.situation import Decision, Place, Situation
from sizing.spot.replay import Job, Saving
from sizing.spot.traces import Life


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """When a policy decides: every `tick` seconds, and at `wakes` of the machines' events."""

    tick: float = 120.0
    # EventBridge delivers an event within seconds, but promises nothing.
    wakes: float = 0.95
    # A schedule of one minute fires somewhere in its minute.
    jitter: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Dollars per hour."""

    spot: float
    on_demand: float


@dataclass(slots=True)
class Outcome:
    """What a job cost: paid seconds by market, seconds by the clock, what happened."""

    spot: float = 0.0
    on_demand: float = 0.0
    seconds: float = 0.0
    losses: int = 0
    moves: int = 0
    is_done: bool = False

    def usd(self, prices: Prices) -> float:
        """Return the dollars that the machines cost."""
        return (self.spot * prices.spot + self.on_demand * prices.on_demand) / 3600

    def is_done_by(self, hours: float) -> bool:
        """Whether the job was done in so many hours, to the second."""
        return self.is_done and self.seconds <= hours * 3600 + 1


class Placement(Protocol):
    """Where to run; asked at every tick."""

    def choose(self, situation: Situation) -> Decision:
        """Return the market until the next decision."""
        ...


@dataclass(slots=True)
class Machine:
    """A machine that is paid for; it trains from `trains` on, if it does."""

    place: Place
    launched: float
    gone: float = math.inf
    stops: float = math.inf
    is_warned: bool = True
    name: str = ""
    trains: float = math.inf
    base: float = 0.0
    interval: float = math.inf

    def trained(self, now: float, job: Job) -> float:
        """Seconds of work done here by now, periodic saves left out."""
        seconds = max(0.0, min(now, self.stops) - self.trains)
        period = self.interval + job.checkpoint
        whole = math.floor(seconds / period)
        return whole * self.interval + min(seconds - whole * period, self.interval)

    def done_at(self, job: Job) -> float:
        """When the job is done here if nothing happens before."""
        left = job.work - self.base
        saves = max(0, math.ceil(left / self.interval) - 1)
        time = self.trains + left + saves * job.checkpoint
        return time if time <= self.stops else math.inf


def replay_fleet(
    lives: Sequence[Life],
    *,
    job: Job,
    save: float,
    saving: Saving,
    placement: Placement,
    prices: Prices,
    clock: Clock,
    horizon: float,
    has_notice: Sequence[bool],
) -> Outcome:
    """Replay `job` from second 0 until it is done or the horizon is reached."""
    return _Fleet(lives, has_notice, job, save, saving, placement, prices, clock).run(horizon)


class _Fleet:
    """The state of one replay: at most one machine of each market, one of them trains."""

    def __init__(
        self,
        lives: Sequence[Life],
        has_notice: Sequence[bool],
        job: Job,
        save: float,
        saving: Saving,
        placement: Placement,
        prices: Prices,
        clock: Clock,
    ) -> None:
        self.lives, self.has_notice, self.job, self.save = lives, has_notice, job, save
        self.saving, self.placement, self.prices, self.clock = saving, placement, prices, clock
        self.luck = random.Random(len(lives))
        self.now, self.index, self.committed = 0.0, 0, 0.0
        self.interval = saving.interval
        self.spot: Machine | None = None
        self.demand: Machine | None = None
        self.trainer: Machine | None = None
        self.asks = True
        self.next_tick = 0.0
        self.outcome = Outcome()

    def run(self, horizon: float) -> Outcome:
        """Go from event to event."""
        while self.now < horizon:
            self._start_spot()
            if self.now >= self.next_tick:
                self.next_tick = self.now + self.clock.tick
                self._apply(self._decide().market)
                self._start_spot()
            done = self.trainer.done_at(self.job) if self.trainer else math.inf
            gone = self.spot.gone if self.spot else math.inf
            comes = self._next_start()
            self.now = max(self.now, min(done, gone, comes, self.next_tick, horizon))
            if done <= self.now:
                self.outcome.is_done = True
                break
            if gone <= self.now:
                self._lose_spot()
        self._end(self.spot)
        self._end(self.demand)
        self.outcome.seconds = self.now
        return self.outcome

    def _next_start(self) -> float:
        """When the fleet's request for Spot is next answered."""
        if not self.asks or self.spot is not None:
            return math.inf
        self._skip_past()
        return self.lives[self.index].start if self.index < len(self.lives) else math.inf

    def _skip_past(self) -> None:
        while self.index < len(self.lives) and self.lives[self.index].end <= self.now:
            self.index += 1

    def _start_spot(self) -> None:
        """Start the Spot machine that the fleet asks for, if one is available now."""
        if self._next_start() > self.now:
            return
        life, is_warned = self.lives[self.index], self.has_notice[self.index]
        notice = self.saving.notice_idle
        stops = life.end if notice is None or not is_warned else max(self.now, life.end - notice)
        self.spot = Machine(
            place="spot", launched=self.now, gone=life.end, stops=stops,
            is_warned=is_warned and notice is not None, name=str(self.index),
        )  # fmt: skip
        if self.trainer is None:
            self._hand_over(self.spot)
        self._wake()

    def _hand_over(self, machine: Machine, *, released: float = 0.0) -> None:
        """Let a machine train as soon as it has booted and the lease is free."""
        # An on-demand machine is not lost: it saves no more often than the last one on Spot.
        if self.saving.retune and machine.place == "spot":
            self.interval = self.saving.retune(self.outcome.losses, self.outcome.spot)
        machine.trains = max(machine.launched + self.job.restart, self.now, released)
        machine.base, machine.interval = self.committed, self.interval
        self.trainer = machine

    def _lose_spot(self) -> None:
        machine = self.spot
        assert machine is not None
        self.spot = None
        self._end(machine)
        self.outcome.losses += 1
        if self.trainer is machine:
            done = machine.trained(self.now, self.job)
            kept = done if machine.is_warned else done // machine.interval * machine.interval
            self.committed = machine.base + kept
            self.trainer = None
            if self.demand is not None:
                self._hand_over(self.demand)
        self._wake()

    def _wake(self) -> None:
        if self.luck.random() < self.clock.wakes:
            self.next_tick = self.now

    def _end(self, machine: Machine | None) -> None:
        """Pay for a machine that ends now."""
        if machine is None:
            return
        seconds = max(0.0, self.now - machine.launched)
        if machine.place == "spot":
            self.outcome.spot += seconds
        else:
            self.outcome.on_demand += seconds

    def _decide(self) -> Decision:
        trainer, job = self.trainer, self.job
        done = trainer.trained(self.now, job) if trainer else 0.0
        whole = done // self.interval * self.interval if trainer else 0.0
        start = trainer.base if trainer else self.committed
        return self.placement.choose(
            Situation(
                now=self.now,
                deadline=job.deadline,
                work=self._with_saves(job.work),
                left=self._with_saves(job.work - start - done),
                committed_left=self._with_saves(job.work - start - whole),
                place=trainer.place if trainer else "none",
                spot_machine=self.spot.name if self.spot else None,
                asks_for_spot=self.asks,
                restart=job.restart,
                save=self.save,
                interval=self.interval,
                until_next=self.clock.tick + self.clock.jitter,
                spot_per_hour=self.prices.spot,
                on_demand_per_hour=self.prices.on_demand,
            )
        )

    def _with_saves(self, work: float) -> float:
        return work + math.ceil(work / self.interval) * self.job.checkpoint

    def _apply(self, market: str) -> None:
        before = self.demand, self.asks
        if market == "on-demand":
            self._hold()
        else:
            self.asks = True
            if market == "spot":
                self._leave_demand()
            elif self.trainer is None:
                self._start_demand()
        self.outcome.moves += before != (self.demand, self.asks)

    def _start_demand(self) -> None:
        self.demand = Machine(place="on-demand", launched=self.now)
        if self.trainer is None:
            self._hand_over(self.demand)

    def _leave_demand(self) -> None:
        """Terminate the on-demand machine: it commits, and Spot goes on, now or when it comes."""
        machine, self.demand = self.demand, None
        if machine is None:
            return
        self._end(machine)
        if self.trainer is not machine:
            return
        done = machine.trained(self.now, self.job)
        self.committed = machine.base + done
        saving = self.save if done else 0.0
        self.outcome.on_demand += saving
        self.trainer = None
        if self.spot is not None:
            self._hand_over(self.spot, released=self.now + saving)

    def _hold(self) -> None:
        """Ask for no more Spot; a Spot machine that trains does so until its notice ends."""
        self.asks = False
        if self.demand is None:
            self._start_demand()
        spot = self.spot
        if spot is None:
            return
        if self.trainer is spot:
            idle = self.saving.notice_idle
            gone = self.now + self.job.notice
            if gone < spot.gone:
                spot.gone, spot.is_warned = gone, idle is not None
                spot.stops = min(spot.stops, gone - (idle or 0.0))
        else:
            self._end(spot)
            self.spot = None
