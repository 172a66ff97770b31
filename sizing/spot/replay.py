"""One job replayed on the lives of Spot machines: every second is counted in exactly one column."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sizing.spot.traces import Life


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
        return self.useful / self.spot if self.spot else 0.0


@dataclass(slots=True)
class SimulatedMachine:
    """A machine in use: the progress it started from, and when it will stop."""

    started: float
    base: float
    interval: float
    gone: float
    stops: float

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
    horizon: float,
    has_notice: Sequence[bool] | None = None,
) -> Ledger:
    """Replay `job` on Spot whenever there is a machine, until it is done or the horizon is reached.

    All lives have notices unless `has_notice` says which.
    """
    return _Replay(lives, has_notice or [True] * len(lives), job, saving, horizon).run()


class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        lives: Sequence[Life],
        has_notice: Sequence[bool],
        job: Job,
        saving: Saving,
        horizon: float,
    ) -> None:
        self.lives, self.has_notice, self.job, self.saving = lives, has_notice, job, saving
        self.horizon = horizon
        self.now, self.progress, self.index = 0.0, 0.0, 0
        self.machine: SimulatedMachine | None = None
        self.ledger = Ledger()

    def run(self) -> Ledger:
        """Take a machine, advance, until the work is done or the horizon is reached."""
        while not self.ledger.is_done and self.now < self.horizon:
            while self.index < len(self.lives) and self.lives[self.index].end <= self.now:
                self.index += 1
            if self.machine is None and self.index < len(self.lives):
                self._take(self.lives[self.index])
            self._advance()
        if self.machine is not None:
            self._leave(is_kept=True)
        return self.ledger

    def _take(self, life: Life) -> None:
        """Start on a machine, if its life has begun."""
        if life.start > self.now:
            return
        interval, stops = self.saving.interval, life.end
        if self.saving.retune:
            interval = self.saving.retune(self.ledger.interruptions, self.ledger.spot)
        if self.saving.notice_idle is not None and self.has_notice[self.index]:
            stops = max(self.now, life.end - self.saving.notice_idle)
        self.machine = SimulatedMachine(
            started=self.now, base=self.progress, interval=interval, gone=life.end, stops=stops
        )

    def _advance(self) -> None:
        """Advance to the next event and account for what it ends."""
        machine, before = self.machine, self.now
        changes = done = math.inf
        if machine is not None:
            changes, done = machine.gone, machine.done_at(self.job)
        elif self.index < len(self.lives):
            changes = self.lives[self.index].start
        self.now = max(self.now, min(changes, done, self.horizon))
        if machine is None:
            self.ledger.waiting += self.now - before
        elif done <= self.now:
            self._leave(is_kept=True)
            self.progress = self.job.work
            self.ledger.is_done = True
        elif machine.gone <= self.now:
            self.ledger.interruptions += 1
            self._leave(is_kept=machine.stops < machine.gone)

    def _leave(self, *, is_kept: bool) -> None:
        """Account for the machine's seconds; what was not saved is lost unless `is_kept`."""
        machine = self.machine
        assert machine is not None
        trained, saving = machine.split(self.now, self.job)
        whole = math.floor(trained / machine.interval) * machine.interval
        kept = trained if is_kept else min(whole, trained)
        seconds = self.now - machine.started
        restart = min(self.job.restart, seconds)
        self.ledger.useful += kept
        self.ledger.lost += trained - kept
        self.ledger.saving += saving
        self.ledger.restart += restart
        self.ledger.notice += seconds - restart - trained - saving
        self.ledger.spot += seconds
        self.progress += kept
        self.machine = None
