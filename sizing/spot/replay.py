"""One job replayed on the lives of Spot machines: every second is counted in exactly one column.

Time is continuous; a placement policy is asked at every change and whenever it asks to be.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from sizing.spot.traces import Life

Place = Literal["none", "spot", "on-demand"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Useful seconds to do, and the deadline from its start; both may be infinite."""

    work: float = math.inf
    deadline: float = math.inf
    restart: float
    checkpoint: float
    notice: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """How a policy saves: every `interval` useful seconds, and at a notice unless it ignores them.

    `notice_idle` is how much of the notice is not trained in: all of it if the trainer stops at the
    notice, else the seconds reserved for saves; None: notices are ignored. `retune` turns losses
    and Spot seconds so far into the interval of the next machine.
    """

    interval: float
    notice_idle: float | None = None
    retune: Callable[[int, float], float] | None = None


@dataclass(slots=True)
class Ledger:
    """Where the seconds went: the first six columns add up to `wall`."""

    useful: float = 0.0
    lost: float = 0.0
    saving: float = 0.0
    restart: float = 0.0
    notice: float = 0.0
    waiting: float = 0.0
    spot: float = 0.0
    on_demand: float = 0.0
    interruptions: int = 0
    is_done: bool = False

    @property
    def wall(self) -> float:
        """Seconds by the clock."""
        lost = self.lost + self.saving + self.restart + self.notice
        return self.useful + lost + self.waiting

    @property
    def goodput(self) -> float:
        """Useful seconds per paid second."""
        paid = self.spot + self.on_demand
        return self.useful / paid if paid else 0.0

    def usd(self, *, spot_per_hour: float, on_demand_per_hour: float) -> float:
        """Return the dollars that the machines cost."""
        return (self.spot * spot_per_hour + self.on_demand * on_demand_per_hour) / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a policy knows: nothing of the future."""

    now: float
    progress: float
    place: Place
    has_spot: bool
    job: Job
    interval: float
    notice_idle: float = 0.0

    @property
    def needed(self) -> float:
        """Seconds of training left, saves included."""
        left = self.job.work - self.progress
        return left + math.ceil(left / self.interval) * self.job.checkpoint


class Placement(Protocol):
    """Where to run. Asked while no Spot machine is held: a job on Spot stays there."""

    def choose(self, view: View) -> tuple[Place, float]:
        """Return where to run now, and the latest time to be asked again."""
        ...


class SpotOnly:
    """On Spot whenever a machine is available, else waiting, like a fleet without a deadline."""

    def choose(self, view: View) -> tuple[Place, float]:
        """Take Spot or wait."""
        return ("spot" if view.has_spot else "none"), math.inf


@dataclass(slots=True)
class SimulatedMachine:
    """A machine in use: the progress it started from, and when it will stop."""

    place: Place
    started: float
    base: float
    interval: float
    gone: float = math.inf
    stops: float = math.inf

    def split(self, until: float, job: Job) -> tuple[float, float]:
        """Return the seconds of training and of saving up to a time, after the restart."""
        seconds = max(0.0, min(until, self.stops) - self.started - job.restart)
        period = self.interval + job.checkpoint
        whole = math.floor(seconds / period)
        rest = seconds - whole * period
        saving = whole * job.checkpoint + max(0.0, rest - self.interval)
        return whole * self.interval + min(rest, self.interval), saving

    def done_at(self, job: Job) -> float:
        """Return the time at which the job is done here if nothing happens before."""
        left = job.work - self.base
        saves = max(0, math.ceil(left / self.interval) - 1) if math.isfinite(left) else 0
        time = self.started + job.restart + left + saves * job.checkpoint
        return time if time <= self.stops else math.inf


def replay(
    lives: Sequence[Life],
    *,
    job: Job,
    saving: Saving,
    placement: Placement,
    horizon: float,
    has_notice: Sequence[bool] | None = None,
) -> Ledger:
    """Replay `job` from second 0 until it is done or the horizon is reached.

    All lives have notices unless `has_notice` says which.
    """
    state = _Replay(lives, has_notice or [True] * len(lives), job, saving, placement, horizon)
    return state.run()


class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        lives: Sequence[Life],
        has_notice: Sequence[bool],
        job: Job,
        saving: Saving,
        placement: Placement,
        horizon: float,
    ) -> None:
        self.lives, self.has_notice, self.job, self.saving = lives, has_notice, job, saving
        self.placement, self.horizon = placement, horizon
        self.now, self.progress, self.index = 0.0, 0.0, 0
        self.interval = saving.interval
        self.machine: SimulatedMachine | None = None
        self.ledger = Ledger()

    def run(self) -> Ledger:
        """Ask the policy, move, advance, until the work is done or the horizon is reached."""
        while not self.ledger.is_done and self.now < self.horizon:
            while self.index < len(self.lives) and self.lives[self.index].end <= self.now:
                self.index += 1
            ask_again = self.horizon
            if self.machine is None or self.machine.place != "spot":
                view = self._view()
                place, ask_again = self.placement.choose(view)
                assert ask_again > self.now, f"asked for the past: {ask_again} at {view}"
                if place != view.place:
                    self._go(place)
            self._advance(ask_again)
        if self.machine is not None:
            self._leave(is_kept=True)
        return self.ledger

    def _life(self) -> Life | None:
        """The life that lasts now."""
        if self.index < len(self.lives) and self.lives[self.index].start <= self.now:
            return self.lives[self.index]
        return None

    def _view(self) -> View:
        machine = self.machine
        trained = 0.0 if machine is None else self._trained(machine)[0]
        return View(
            now=self.now,
            progress=self.progress + trained,
            place="none" if machine is None else machine.place,
            has_spot=self._life() is not None,
            job=self.job,
            interval=self.interval,
            notice_idle=self.saving.notice_idle or 0.0,
        )

    def _trained(self, machine: SimulatedMachine) -> tuple[float, float]:
        return machine.split(self.now, self.job)

    def _go(self, place: Place) -> None:
        """Leave the current machine, if any, with a save; take the next one, if any."""
        if self.machine is not None:
            self._leave(is_kept=True)
            self._pay_for_save()
        if place == "none":
            return
        if self.saving.retune:
            self.interval = self.saving.retune(self.ledger.interruptions, self.ledger.spot)
        machine = SimulatedMachine(
            place=place, started=self.now, base=self.progress, interval=self.interval
        )
        if place == "spot":
            life = self._life()
            if life is None:  # It ended while the other machine was saving.
                return
            machine.gone = machine.stops = life.end
            if self.saving.notice_idle is not None and self.has_notice[self.index]:
                machine.stops = max(self.now, life.end - self.saving.notice_idle)
        self.machine = machine

    def _pay_for_save(self) -> None:
        self.ledger.saving += self.job.checkpoint
        self.ledger.on_demand += self.job.checkpoint
        self.now += self.job.checkpoint

    def _advance(self, ask_again: float) -> None:
        """Advance to the next event and account for what it ends."""
        life = self._life()
        changes = self.horizon
        if life is not None:
            changes = life.end
        elif self.index < len(self.lives):
            changes = self.lives[self.index].start
        machine, before = self.machine, self.now
        done = math.inf if machine is None else machine.done_at(self.job)
        self.now = max(self.now, min(changes, ask_again, done, self.horizon))
        if machine is None:
            self.ledger.waiting += self.now - before
        elif done <= self.now:
            self._leave(is_kept=True)
            self.progress = self.job.work
            self.ledger.is_done = True
        elif machine.gone <= self.now:
            is_warned = machine.stops < machine.gone
            self.ledger.interruptions += 1
            self._leave(is_kept=is_warned)

    def _leave(self, *, is_kept: bool) -> None:
        """Account for the machine's seconds; what was not saved is lost unless `is_kept`."""
        machine = self.machine
        assert machine is not None
        trained, saving = self._trained(machine)
        whole = math.floor(trained / machine.interval) * machine.interval
        kept = trained if is_kept else min(whole, trained)
        seconds = self.now - machine.started
        restart = min(self.job.restart, seconds)
        self.ledger.useful += kept
        self.ledger.lost += trained - kept
        self.ledger.saving += saving
        self.ledger.restart += restart
        self.ledger.notice += seconds - restart - trained - saving
        if machine.place == "spot":
            self.ledger.spot += seconds
        else:
            self.ledger.on_demand += seconds
        self.progress += kept
        self.machine = None
