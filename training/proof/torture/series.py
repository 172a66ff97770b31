"""Tortures runs one after another until the kills are used up, and compares each finished run.

It also knows which exits of an attempt are expected, and counts the totals.

Draws from a torture's seed: the variant of each run, and the kill of each attempt.

A variant's properties and the kinds of kill come from decks that are reshuffled when empty, so even
a short series has every card. The recipe changes the bits, the number of ranks does not: a run is
compared with the uninterrupted one of its recipe on one rank. Where ranks do change the bits
(shares, a ring), all attempts of both runs have the same number. Hosts are groups of processes that
share no file but the run; a lost one takes all its ranks along.
"""

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from contract.errors import Exit, UserError
from training.durable import Head, Store
from training.proof.attempt import EXIT_CRASHED, Saving
from training.proof.experiment import (
    AttemptResult,
    Experiment,
    RunOutcome,
    Runs,
    broken_promises,
    differences,
)
from training.proof.injector import SIGNALS, Kill, Kind, Side

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


_MOST_KILLS_OF_ONE_RUN = 12
_FRESH_ONE_IN = 10
# One undisturbed attempt finishes the run, or more if a killed one still holds the lease.
_MOST_UNDISTURBED_ATTEMPTS = 3
_REFERENCE_ATTEMPTS = 3
_HANG_SECONDS = 120.0
# The time of an uninterrupted run, until one is measured: a tenth of what it may take.
_USUAL_SECONDS = 60.0
# Short enough for a held attempt not to delay the series; long enough for a small save.
_HELD_BUDGET_SECONDS = 0.6
_EXPECTED_EXITS = (Exit.FINISHED, Exit.INTERRUPTED, Exit.LEASE_LOST)


@dataclass(slots=True)
class Totals:
    """Counts of what was done, and the differences found."""

    kills: int = 0
    runs: int = 0
    attempts: int = 0
    fresh_attempts: int = 0
    faults: int = 0
    steps: int = 0
    steps_repeated: int = 0
    checkpoints_passed_over: int = 0
    dated_notices: int = 0
    dated_trained_on: int = 0
    dated_ended_by: Counter[str] = field(default_factory=Counter)
    steps_gained: int = 0  # trained after a dated notice, and not repeated
    by_kind_and_phase: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_kind_and_ranks: Counter[tuple[str, str]] = field(default_factory=Counter)
    attempts_by_ranks: Counter[str] = field(default_factory=Counter)
    runs_with: dict[str, Counter[str]] = field(default_factory=dict)
    exit_codes: Counter[int] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def count(self, attempt: AttemptResult, size: Size) -> None:
        """Count one attempt of a run."""
        self.attempts_by_ranks[str(size)] += 1
        self.exit_codes[attempt.code] += 1
        self.faults += attempt.num_faults
        if attempt.kill:
            kind = attempt.kill.kind
            self.kills += 1
            self.by_kind_and_phase[kind, attempt.hit_phase] += 1
            if size.ranks > 1:
                self.by_kind_and_ranks[kind, _ranks(attempt.kill)] += 1
        if attempt.kill and attempt.kill.kind == "dated":
            self.dated_notices += 1
            self.dated_trained_on += attempt.trained_on
            self.dated_ended_by[_ended_by(attempt)] += 1


@dataclass(kw_only=True)
class Torture:
    """Runs of several seeds; says one line after every experiment."""

    runs: Runs
    recipes: Sequence[str]
    sizes: Sequence[Size]
    recipes_of_ranks: Set[str]  # whose results have bits that depend on the number of ranks
    intervals: Sequence[str]
    stops_at_first: bool  # whether the first run that differs ends the torture
    num_kills: int  # wanted in total
    totals: Totals = field(default_factory=Totals)
    began: float = field(default_factory=time.monotonic)
    drawn: int = 0  # kills, of which some hit no live attempt
    # The uninterrupted run and its seconds, by recipe, and number of ranks where that matters.
    _references: dict[tuple[str, int], tuple[RunOutcome, float]] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Print one line, after what is done."""
        done = (
            f"[{self.totals.kills}/{self.num_kills} kills, {time.monotonic() - self.began:.0f} s]"
        )
        print(f"{done} {line}", file=sys.stderr, flush=True)

    def go(self, seed: int, kills: int) -> None:
        """Torture runs until `kills` more kills have hit a live attempt."""
        rng = random.Random(seed)
        recipes, sizes = Deck(rng, self.recipes), Deck(rng, self.sizes)
        intervals, savings = Deck(rng, self.intervals), Deck(rng, SAVINGS)
        kinds = Deck(rng, list(Counter(KINDS).elements()))
        end, number = self.totals.kills + kills, 0
        while self.totals.kills < end and not (self.stops_at_first and self.totals.differences):
            number += 1
            recipe = recipes.draw()
            is_fixed = recipe in self.recipes_of_ranks
            variant = Variant(
                recipe=recipe,
                sizes=(sizes.draw(),) if is_fixed else tuple(self.sizes),
                interval=intervals.draw(),
                saving=savings.draw(),
            )
            reference, seconds = self._reference(f"seed-{seed}", variant)
            run = _Run(self, f"seed-{seed}-run-{number:03d}", variant, seconds)
            run.torture(rng, kinds, Deck(rng, variant.sizes) if is_fixed else sizes, end)
            run.compare(reference)

    def _reference(self, prefix: str, variant: Variant) -> tuple[RunOutcome, float]:
        ranks = variant.sizes[0].ranks if variant.recipe in self.recipes_of_ranks else 1
        key = variant.recipe, ranks
        if key not in self._references:
            name = f"{prefix}-reference-{variant.recipe}-{ranks}"
            self._references[key] = self._run_reference(name, variant, Size(ranks))
        return self._references[key]

    def _run_reference(self, name: str, variant: Variant, size: Size) -> tuple[RunOutcome, float]:
        for again in range(_REFERENCE_ATTEMPTS):
            # If the store failed, another run: one that resumes cannot be the reference.
            run = _Run(self, f"{name}-{again}" if again else name, variant, _USUAL_SECONDS)
            (result,) = run.experiment(Experiment(), size)
            if result.code != Exit.STORE:
                break
        if result.code != Exit.FINISHED:
            last = result.log.strip().splitlines()[-1:] or ["without output"]
            raise UserError(
                f"the workload fails even without kills (exit code {result.code}): {last[0]}"
            )
        outcome = self.runs.outcome(run.name)
        self.totals.differences += [f"{name}: {why}" for why in outcome.rules_broken]
        self.say(f"{name}: {len(outcome.steps)} steps in {result.seconds:.2f} s")
        return outcome, result.seconds


@dataclass(slots=True)
class _Run:
    """One run: killed until it is finished or has had its share."""

    _torture: Torture
    name: str
    _variant: Variant
    _seconds: float  # of the uninterrupted run
    _known: dict[str, bool] = field(default_factory=dict)

    def torture(self, rng: random.Random, kinds: Deck[Kind], sizes: Deck[Size], end: int) -> None:
        """Kill it, until all runs together have had `end` kills; then let it finish."""
        totals, kills = self._torture.totals, 0
        totals.runs += 1
        for what, label in self._variant.labels.items():
            totals.runs_with.setdefault(what, Counter())[label] += 1
        self._say(", ".join(" ".join(pair) for pair in self._variant.labels.items()))
        while kills < _MOST_KILLS_OF_ONE_RUN and totals.kills < end and not self._is_over:
            kind, size = kinds.draw(), sizes.draw()
            self._torture.drawn += 1
            experiment = draw_experiment(
                rng,
                kind,
                run_seconds=self._seconds,
                ttl_seconds=self._torture.runs.request.ttl_seconds,
                is_fresh=self._torture.drawn % _FRESH_ONE_IN == 0,
                size=size,
            )
            results = self._checked(experiment, size)
            kills += sum(1 for attempt in results if attempt.kill)
            if results[0].kill is None:
                kinds.put_back(kind)  # it hit no live attempt
            summary = ", ".join(_summary_of(attempt) for attempt in results)
            self._say(f"{size} rank{'s' * (size.ranks > 1)}: {summary}")
        for _ in range(_MOST_UNDISTURBED_ATTEMPTS):
            if not self._is_over:
                self._checked(Experiment(), sizes.draw())

    def compare(self, reference: RunOutcome) -> None:
        """Compare the finished run with the uninterrupted one."""
        totals, head = self._torture.totals, Head.read(self._store)
        if not self._is_over:
            self._differs(["the run did not finish"])
            return
        if head is None or head.state != "finished":
            self._differs([f"the run failed: {head.reason if head else 'no head'}"])
            return
        outcome = self._torture.runs.outcome(self.name)
        totals.steps += len(outcome.steps)
        totals.steps_repeated += outcome.num_steps_done - len(outcome.steps)
        totals.steps_gained += outcome.num_steps_gained
        totals.checkpoints_passed_over += len(outcome.passed_over)
        found = differences(outcome, reference)
        self._differs(found)
        self._say("; ".join(found) or "equal")

    def experiment(self, experiment: Experiment, size: Size) -> list[AttemptResult]:
        """Run one or two attempts of this size."""
        runs, variant = self._torture.runs, self._variant
        is_held = any(kill.kind == "held" for kill in experiment.kills)
        results = runs.attempt(
            self.name,
            experiment,
            recipe=variant.recipe,
            num_processes=size.ranks,
            num_hosts=size.hosts,
            interval=variant.interval,
            saving=variant.saving,
            budget_seconds=_HELD_BUDGET_SECONDS if is_held else runs.request.budget_seconds,
            most_seconds=_HANG_SECONDS + 10 * self._seconds,
        )
        self._torture.totals.attempts = runs.num_attempts
        self._torture.totals.fresh_attempts += experiment.is_fresh
        return results

    def _checked(self, experiment: Experiment, size: Size) -> list[AttemptResult]:
        """Run and count the attempts, and find what must never happen."""
        results = self.experiment(experiment, size)
        # A store on the network may have failed by itself.
        is_store_faulty = self._torture.runs.uri.startswith("s3://")
        for attempt in results:
            self._torture.totals.count(attempt, size)
            wrong = _unexpected_exit(attempt, is_store_faulty=is_store_faulty)
            self._differs([f"an attempt {why}" for why in wrong])
        self._differs(broken_promises(self._store, self._known))
        return results

    def _differs(self, found: Sequence[str]) -> None:
        known = self._torture.totals.differences
        known += [line for why in found if (line := f"{self.name}: {why}") not in known]

    def _say(self, line: str) -> None:
        self._torture.say(f"{self.name}: {line}")

    @property
    def _store(self) -> Store:
        return self._torture.runs.store(self.name)

    @property
    def _is_over(self) -> bool:
        head = Head.read(self._store)
        return head is not None and head.state in ("finished", "failed")


def _unexpected_exit(attempt: AttemptResult, *, is_store_faulty: bool) -> list[str]:
    """Unexpected facts about an attempt's end, as ends of sentences."""
    wrong = [f"left rank {rank} running ({attempt.folder})" for rank in attempt.outlived_by]
    is_damaging = is_store_faulty or attempt.num_faults > 0
    is_zombie = attempt.kill is not None and attempt.kill.kind == "zombie"
    # On a busy machine the other hosts may begin later than the first one waits for them.
    is_unlucky = is_damaging or _lost_a_rank(attempt) or "did not come within" in attempt.log
    excused: dict[int, bool] = {
        Exit.FAILED: is_unlucky,
        # A successor has swept what a zombie was saving when it was suspended.
        Exit.STORE: is_unlucky or is_zombie,
        # A machine that reads nothing but damage ends; the run goes on elsewhere.
        Exit.MACHINE: is_damaging,
    }
    is_excused = excused.get(attempt.code, False)
    if attempt.code not in _EXPECTED_EXITS and not is_excused and not _is_killed(attempt):
        what = "crashed" if attempt.code == EXIT_CRASHED else f"ended with {attempt.code}"
        last = attempt.log.strip().splitlines()[-1:] or [""]
        wrong.append(f"{what}: {last[0]} ({attempt.folder})")
    return wrong


def _summary_of(attempt: AttemptResult) -> str:
    """Describe an attempt in a few words."""
    how = "not hit"
    if attempt.kill:
        how = f"{attempt.kill.kind} of {_ranks(attempt.kill)} in {attempt.hit_phase}"
    if attempt.trained_on:
        how += f", trained on, ended by {_ended_by(attempt)}"
    faults = f", {attempt.num_faults} store faults" if attempt.num_faults else ""
    return f"{how}{faults}, exit {attempt.code}"


def _is_killed(attempt: AttemptResult) -> bool:
    """Whether the signal itself ended it: SIGKILL, or another one before its handler existed."""
    if attempt.kill is None or attempt.kill.target_rank:
        return False
    if attempt.code in (-number for number in attempt.follow_up):
        return attempt.code == -signal.SIGKILL
    if attempt.code != -SIGNALS[attempt.kill.kind]:
        return False
    return attempt.kill.kind in ("kill", "rival") or attempt.hit_phase == "start-up"


def _lost_a_rank(attempt: AttemptResult) -> bool:
    """Whether the signal ended another rank, without which rank 0 cannot continue.

    A rank that is held or has a short notice exits by itself before rank 0 learns of a notice that
    only that rank got; and the end of a dated notice kills it in any case.
    """
    kill = attempt.kill
    if kill is None or kill.target_rank == 0:
        return False
    return kill.kind in ("kill", "rival", "held", "dated") or attempt.hit_phase == "start-up"


def _ended_by(attempt: AttemptResult) -> str:
    """Return what ended an attempt after a dated notice."""
    return attempt.follow_up[-1].name if attempt.follow_up else "itself"


def _ranks(kill: Kill) -> str:
    if kill.target_rank is None:
        return "all ranks"
    if kill.on_host:
        return f"host {kill.target_rank // kill.on_host}"
    return f"rank {kill.target_rank}"
