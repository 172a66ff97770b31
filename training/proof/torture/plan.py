"""What is done to an attempt: drawn from a seed, written as JSON, read by the attempt itself.

A kill comes at a random time, or at a named point: before or after the nth time that the attempt
does one thing, so that windows of microseconds are hit on purpose.
"""

import random
from dataclasses import dataclass, replace
from signal import Signals
from typing import Literal, TypeAlias

Side: TypeAlias = Literal["before", "after"]
# zombie: stopped, resumed after a successor took over. rival: two attempts at once. held: a notice
# in work that no step boundary ends in time, so that what was staged before it is committed. dated:
# a notice that names its time, so that training goes on until the machine ends (or a little less).
Kind: TypeAlias = Literal["kill", "term", "notice", "dated", "held", "zombie", "rival"]

SIGNALS: dict[Kind, Signals] = {
    "kill": Signals.SIGKILL,
    "term": Signals.SIGTERM,
    "notice": Signals.SIGUSR1,
    "dated": Signals.SIGUSR1,
    "held": Signals.SIGUSR1,
    "zombie": Signals.SIGSTOP,
    "rival": Signals.SIGKILL,
}
# What an attempt can be doing -> how often it does so, about, in a run of seconds.
PHASES: dict[str, int] = {
    "take-over": 1,
    "resume": 3,
    "preparation": 3,
    "artifact": 3,
    "start of a stage": 1,
    "step": 12,
    "evaluation": 6,
    "metrics": 3,
    "event": 3,
    "upload": 6,
    "publication": 3,
    "heartbeat": 4,
    "retention": 2,
    "release": 1,
    "final weights": 1,
    "receipt": 1,
    "finish": 1,
}
# What ranks above 0 do as well.
_OF_ALL_RANKS = ("preparation", "artifact", "start of a stage", "step", "evaluation")
_HELD_IN = ("step", "step", "step", "evaluation", "start of a stage")
# Where much is left to train; at a random time a dated notice comes anywhere.
_DATED_IN = ("preparation", "step", "step", "step", "evaluation", "upload", "publication")
# How often each kind is dealt, of as many kills as these are together.
KINDS: dict[Kind, int] = {
    "kill": 9,
    "term": 3,
    "notice": 2,
    "dated": 4,
    "held": 1,
    "zombie": 2,
    "rival": 2,
}
# Seconds of a dated notice, the shortest and how many times as long the longest is: some have time
# for a second save and some have none. A longer workload has longer ones.
_NOTICE_SECONDS = 0.2
_NOTICE_SPREAD = 10.0
_RUN_SECONDS = 3.0
_SHARE_AT_A_POINT = 0.6
_SHARE_WITH_FAULTS = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """One kill: after so many seconds, or at the nth time on one side of a phase."""

    kind: Kind
    seconds: float | None = None
    phase: str | None = None
    side: Side = "before"
    occurrence: int = 1
    aim: int | None = 0  # the rank that is signalled; None: all of them
    seen_by: int = 0  # the rank whose phases count
    notice_seconds: float | None = None  # how far ahead the time lies that the notice names
    term_seconds: float | None = None  # after the notice comes a SIGTERM
    kill_seconds: float | None = None  # and the end of the machine, at the named time or sooner

    @property
    def signal(self) -> Signals:
        """What the attempt is sent."""
        return SIGNALS[self.kind]

    @property
    def aftermath(self) -> list[tuple[float, Signals]]:
        """What it is sent so many seconds later, if it has not ended."""
        later = ((self.term_seconds, Signals.SIGTERM), (self.kill_seconds, Signals.SIGKILL))
        return [(seconds, number) for seconds, number in later if seconds is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What is done next: one attempt and its trouble, and a second attempt beside it or none."""

    trouble: Trouble | None = None
    second: Trouble | None = None
    second_after_seconds: float = 0.0
    zombie_sleeps_seconds: float = 0.0
    fault_rate: float = 0.0  # share of the store's operations that go wrong
    fault_seed: int = 0
    is_fresh: bool = False  # a new interpreter instead of a fork


def draw_scene(
    rng: random.Random,
    kind: Kind,
    *,
    run_seconds: float,
    ttl_seconds: float,
    is_fresh: bool,
    num_processes: int = 1,
) -> Scene:
    """Draw a scene of this kind for a run that takes `run_seconds` when nobody disturbs it."""
    has_faults = rng.random() < _SHARE_WITH_FAULTS
    trouble = _draw_trouble(rng, kind, run_seconds, ttl_seconds, num_processes)
    second = None
    if kind in ("zombie", "rival"):
        other: Kind = rng.choice(["kill", "term", "notice", "dated"])
        second = _draw_trouble(rng, other, run_seconds, 2 * ttl_seconds, num_processes)
    return Scene(
        trouble=trouble,
        second=second,
        second_after_seconds=rng.uniform(0, 0.3) if kind == "rival" else 0.0,
        zombie_sleeps_seconds=ttl_seconds + rng.uniform(0, run_seconds),
        fault_rate=rng.choice([0.01, 0.03, 0.1]) if has_faults else 0.0,
        fault_seed=rng.getrandbits(32),
        is_fresh=is_fresh,
    )


def _draw_trouble(
    rng: random.Random, kind: Kind, run_seconds: float, ttl_seconds: float, num_processes: int
) -> Trouble:
    aim = _draw_aim(rng, kind, num_processes)
    if kind == "held" or rng.random() < _SHARE_AT_A_POINT:
        trouble = _draw_point(rng, kind, aim)
    else:
        # The holder before may have been killed: then the first TTL is spent waiting.
        waited = ttl_seconds if rng.random() < 0.6 else 0.0
        seconds = waited + rng.uniform(0, 0.7 * run_seconds)
        trouble = Trouble(kind=kind, seconds=seconds, aim=aim)
    return _dated(rng, trouble, run_seconds) if kind == "dated" else trouble


def _draw_point(rng: random.Random, kind: Kind, aim: int | None) -> Trouble:
    phase = rng.choice({"held": _HELD_IN, "dated": _DATED_IN}.get(kind) or list(PHASES))
    side: Side = rng.choice(["before", "after"])
    # What was never measured is not begun in the extra time of a notice, so it comes later.
    often = PHASES[phase]
    least, most = (often // 2, 2 * often) if kind == "dated" else (1, often)
    is_seen = aim and phase in _OF_ALL_RANKS
    return Trouble(
        kind=kind,
        phase=phase,
        side=side,
        occurrence=rng.randint(least, most),
        aim=aim,
        seen_by=aim if aim and is_seen else 0,
    )


def _dated(rng: random.Random, trouble: Trouble, run_seconds: float) -> Trouble:
    """With its time, and when the machine ends: then or sooner; or a SIGTERM comes before."""
    shortest = _NOTICE_SECONDS * max(1.0, run_seconds / _RUN_SECONDS)
    seconds = shortest * _NOTICE_SPREAD ** rng.random()
    ending = rng.choice(["as said", "as said", "sooner", "SIGTERM"])
    return replace(
        trouble,
        notice_seconds=seconds,
        kill_seconds=seconds * (rng.uniform(0.1, 1.0) if ending == "sooner" else 1.0),
        term_seconds=seconds * rng.uniform(0.1, 0.8) if ending == "SIGTERM" else None,
    )


def _draw_aim(rng: random.Random, kind: Kind, num_processes: int) -> int | None:
    """One rank or all; a machine that is suspended stops all its processes."""
    if num_processes == 1:
        return 0
    if kind == "zombie":
        return None
    return rng.choice([None, 0, rng.randrange(1, num_processes)])
