"""Draws from a torture's seed: the variant of each run, and the kill of each attempt.

A variant's properties and the kinds of kill come from decks that are reshuffled when empty, so even
a short series has every card. The recipe changes the bits, the number of ranks does not: a run is
compared with the uninterrupted one of its recipe on one rank. Where ranks do change the bits
(shares, a ring), all attempts of both runs have the same number. Hosts are groups of processes that
share no file but the run; a lost one takes all its ranks along.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from training.proof.attempt import Saving
from training.proof.experiment import Experiment
from training.proof.injector import Kill, Kind, Side

_T = TypeVar("_T")
SAVINGS: tuple[Saving, ...] = ("staged", "staged", "streamed")
# The phases of an attempt -> about how often each occurs in a run of seconds.
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
# Phases that ranks above 0 have, too.
_OF_ALL_RANKS = ("preparation", "artifact", "start of a stage", "step", "evaluation")
_HELD_IN = ("step", "step", "step", "evaluation", "start of a stage")
# Phases with much left to train; at random times a dated notice comes in any phase.
_DATED_IN = ("preparation", "step", "step", "step", "evaluation", "upload", "publication")
# How often each kind is drawn, out of the sum of these numbers.
KINDS: dict[Kind, int] = {
    "kill": 9,
    "term": 3,
    "notice": 2,
    "dated": 4,
    "held": 1,
    "zombie": 2,
    "rival": 2,
}
# The shortest dated notice in seconds, and the ratio of longest to shortest: some leave time for a
# second save, some do not. A longer workload gets longer ones.
_NOTICE_SECONDS = 0.2
_NOTICE_SPREAD = 10.0
_RUN_SECONDS = 3.0
_SHARE_AT_A_POINT = 0.6
_SHARE_WITH_FAULTS = 0.4
_SHARE_OF_HOSTS = 0.5


class Size(NamedTuple):
    """The ranks of an attempt: so many on each of its hosts."""

    each: int
    hosts: int = 1

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.each * self.hosts

    def __str__(self) -> str:
        return f"{self.hosts}x{self.each}" if self.hosts > 1 else str(self.each)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The properties of one run."""

    recipe: str
    sizes: tuple[Size, ...]  # of which each attempt has one
    interval: str
    saving: Saving

    @property
    def labels(self) -> dict[str, str]:
        """The properties by name, as counted in the report."""
        return {
            "recipe": self.recipe,
            "ranks": ",".join(map(str, self.sizes)),
            "interval": self.interval,
            "save": self.saving,
        }


class Deck(Generic[_T]):
    """Draws cards in random order, each one before any is repeated."""

    def __init__(self, rng: random.Random, cards: Sequence[_T]) -> None:
        self._rng = rng
        self._cards = cards
        self._left: list[_T] = []

    def draw(self) -> _T:
        """The next card."""
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()

    def put_back(self, card: _T) -> None:
        """Return a card that could not be used, to be drawn next."""
        self._left.append(card)


def draw_experiment(
    rng: random.Random,
    kind: Kind,
    *,
    run_seconds: float,
    ttl_seconds: float,
    is_fresh: bool,
    size: Size,
) -> Experiment:
    """Draw an experiment of this kind for a run that takes `run_seconds` if undisturbed."""
    has_faults = rng.random() < _SHARE_WITH_FAULTS
    kill = _draw_kill(rng, kind, run_seconds, ttl_seconds, size)
    second = None
    if kind in ("zombie", "rival"):
        other: Kind = rng.choice(["kill", "term", "notice", "dated"])
        second = _draw_kill(rng, other, run_seconds, 2 * ttl_seconds, size)
    return Experiment(
        kills=(kill,),
        second=second,
        second_after_seconds=rng.uniform(0, 0.3) if kind == "rival" else 0.0,
        zombie_sleeps_seconds=ttl_seconds + rng.uniform(0, run_seconds),
        fault_rate=rng.choice([0.01, 0.03, 0.1]) if has_faults else 0.0,
        fault_seed=rng.getrandbits(32),
        is_fresh=is_fresh,
    )


def _draw_kill(
    rng: random.Random, kind: Kind, run_seconds: float, ttl_seconds: float, size: Size
) -> Kill:
    target_rank = _draw_target_rank(rng, kind, size.ranks)
    if kind == "held" or rng.random() < _SHARE_AT_A_POINT:
        kill = _draw_point(rng, kind, target_rank)
    else:
        # If the previous holder was killed, the attempt first waits for one TTL.
        waited = ttl_seconds if rng.random() < 0.6 else 0.0
        seconds = waited + rng.uniform(0, 0.7 * run_seconds)
        kill = Kill(kind=kind, seconds=seconds, target_rank=target_rank)
    if size.hosts > 1 and target_rank is not None and rng.random() < _SHARE_OF_HOSTS:
        kill = replace(kill, target_rank=target_rank - target_rank % size.each, on_host=size.each)
    return _dated(rng, kill, run_seconds) if kind == "dated" else kill


def _draw_point(rng: random.Random, kind: Kind, target_rank: int | None) -> Kill:
    phase = rng.choice({"held": _HELD_IN, "dated": _DATED_IN}.get(kind) or list(PHASES))
    side: Side = rng.choice(["before", "after"])
    # Extra time is only used for work that was measured before, so dated notices come later.
    often = PHASES[phase]
    least, most = (often // 2, 2 * often) if kind == "dated" else (1, often)
    is_seen = target_rank and phase in _OF_ALL_RANKS
    return Kill(
        kind=kind,
        phase=phase,
        side=side,
        occurrence=rng.randint(least, most),
        target_rank=target_rank,
        observed_rank=target_rank if target_rank and is_seen else 0,
    )


def _dated(rng: random.Random, kill: Kill, run_seconds: float) -> Kill:
    """Add the notice's time, and the machine's end: then, sooner, or with a SIGTERM before."""
    shortest = _NOTICE_SECONDS * max(1.0, run_seconds / _RUN_SECONDS)
    seconds = shortest * _NOTICE_SPREAD ** rng.random()
    ending = rng.choice(["on time", "on time", "sooner", "SIGTERM"])
    return replace(
        kill,
        notice_seconds=seconds,
        kill_seconds=seconds * (rng.uniform(0.1, 1.0) if ending == "sooner" else 1.0),
        term_seconds=seconds * rng.uniform(0.1, 0.8) if ending == "SIGTERM" else None,
    )


def _draw_target_rank(rng: random.Random, kind: Kind, num_processes: int) -> int | None:
    """Draw one rank or all; a suspended machine stops all its processes."""
    if num_processes == 1:
        return 0
    if kind == "zombie":
        return None
    return rng.choice([None, 0, rng.randrange(1, num_processes)])
