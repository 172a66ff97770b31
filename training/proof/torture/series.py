"""Tortures runs one after another until the kills are used up, and compares each finished run."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from training.errors import EXIT_FINISHED, EXIT_STORE, UserError
from training.proof.torture.attempt import AttemptRequest
from training.proof.torture.compare import (
    Outcome,
    broken_promises,
    differences,
    read_outcome,
    sample_problems,
)
from training.proof.torture.experiment import AttemptResult, run_experiment
from training.proof.torture.plan import KINDS, Experiment, Kill, draw_experiment
from training.proof.torture.totals import Totals, summary_of, unexpected_exit
from training.proof.torture.variants import Deck, Variant, VariantDeck
from training.record.head import read_head
from training.store.open import open_store
from training.store.protocol import Store

_MOST_KILLS_OF_ONE_RUN = 12
_FRESH_ONE_IN = 10
# One undisturbed attempt finishes the run, or more if a killed one still holds the lease.
_MOST_UNDISTURBED_ATTEMPTS = 3
_REFERENCE_ATTEMPTS = 3
_HANG_SECONDS = 120.0
# Short enough for a held attempt not to delay the series; long enough for a small save.
_HELD_BUDGET_SECONDS = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What to torture, and where."""

    workload: str
    recipes: Sequence[str]
    num_processes: Sequence[int]
    intervals: Sequence[str]
    overrides: Mapping[str, str]
    dataset: Path
    runs_uri: str
    ttl_seconds: float
    budget_seconds: float
    stops_at_first: bool  # whether the first run that differs ends the torture
    out: Path


class Reference:
    """The uninterrupted run of one recipe and number of ranks."""

    def __init__(self, outcome: Outcome, seconds: float) -> None:
        self.outcome = outcome
        self.seconds = seconds


# By recipe and number of ranks; the runs of all seeds are compared with the same references.
References: TypeAlias = dict[tuple[str, int], Reference]


class Series:
    """One seed's runs. `say` is called with one line after every experiment."""

    def __init__(
        self,
        target: Target,
        seed: int,
        totals: Totals,
        references: References,
        say: Callable[[str], None],
    ) -> None:
        self._target = target
        self._seed = seed
        self._rng = random.Random(seed)
        self._totals = totals
        self._references = references
        self._say = say
        self._variants = VariantDeck(
            self._rng,
            recipes=target.recipes,
            num_processes=target.num_processes,
            intervals=target.intervals,
        )
        self._kinds = Deck(self._rng, list(Counter(KINDS).elements()))
        self._stores: dict[str, Store] = {}
        self._attempt = 0
        self._drawn = 0

    def go(self, kills: int) -> None:
        """Torture runs until `kills` more kills have hit a live attempt."""
        end = self._totals.kills + kills
        number = 0
        while self._totals.kills < end and not self._must_stop:
            number += 1
            self._torture(f"seed-{self._seed}-run-{number:03d}", self._variants.draw(), end)

    @property
    def _must_stop(self) -> bool:
        return self._target.stops_at_first and bool(self._totals.differences)

    def _reference(self, variant: Variant) -> Reference:
        key = variant.recipe, variant.num_processes
        if key not in self._references:
            self._references[key] = self._run_reference(variant)
        return self._references[key]

    def _run_reference(self, variant: Variant) -> Reference:
        name = f"seed-{self._seed}-reference-{variant.recipe}-{variant.num_processes}"
        result = self._run_experiment(name, variant, Experiment(), 0.0)[0]
        for again in range(2, _REFERENCE_ATTEMPTS + 1):
            if result.code != EXIT_STORE:
                break
            # Of a store that fails: a new run, since one that resumes is no reference.
            result = self._run_experiment(f"{name}-{again}", variant, Experiment(), 0.0)[0]
        if result.code != EXIT_FINISHED:
            last = result.log.strip().splitlines()[-1:] or ["without output"]
            raise UserError(
                f"the workload fails even without kills (exit code {result.code}): {last[0]}"
            )
        outcome = read_outcome(self._store(name), self._target.out)
        self._totals.differences += [f"{name}: {why}" for why in sample_problems(outcome)]
        self._say(f"{name}: {len(outcome.steps)} steps in {result.seconds:.2f} s")
        return Reference(outcome, result.seconds)

    def _torture(self, name: str, variant: Variant, end: int) -> None:
        """Kill one run until it is finished or has had its share; then compare it."""
        totals, kills, reference = self._totals, 0, self._reference(variant)
        known: dict[str, bool] = {}
        totals.runs += 1
        for what, label in variant.labels.items():
            totals.runs_with.setdefault(what, Counter())[label] += 1
        self._say(f"{name}: {', '.join(' '.join(pair) for pair in variant.labels.items())}")
        while kills < _MOST_KILLS_OF_ONE_RUN and totals.kills < end and not self._is_over(name):
            kind = self._kinds.draw()
            self._drawn += 1
            experiment = draw_experiment(
                self._rng,
                kind,
                run_seconds=reference.seconds,
                ttl_seconds=self._target.ttl_seconds,
                is_fresh=self._drawn % _FRESH_ONE_IN == 0,
                num_processes=variant.num_processes,
            )
            results = self._run_experiment(name, variant, experiment, reference.seconds)
            self._check(name, variant, results, known)
            kills += sum(1 for attempt in results if attempt.kind)
            if results[0].kind is None:
                self._kinds.put_back(kind)  # it hit no live attempt
            self._say(f"{name}: " + ", ".join(summary_of(attempt) for attempt in results))
        for _ in range(_MOST_UNDISTURBED_ATTEMPTS):
            if self._is_over(name):
                break
            results = self._run_experiment(name, variant, Experiment(), reference.seconds)
            self._check(name, variant, results, known)
        self._compare(name, reference.outcome)

    def _check(
        self, name: str, variant: Variant, results: list[AttemptResult], known: dict[str, bool]
    ) -> None:
        """Count the attempts, and find what must never happen."""
        # A store on the network may have failed by itself.
        is_store_faulty = self._target.runs_uri.startswith("s3://")
        for attempt in results:
            self._totals.count(attempt, variant)
            wrong = unexpected_exit(attempt, is_store_faulty=is_store_faulty)
            self._totals.differences += [f"{name}: an attempt {why}" for why in wrong]
        for why in broken_promises(self._store(name), known):
            if f"{name}: {why}" not in self._totals.differences:
                self._totals.differences.append(f"{name}: {why}")

    def _compare(self, name: str, reference: Outcome) -> None:
        totals = self._totals
        if not self._is_over(name):
            totals.differences.append(f"{name}: the run did not finish")
            return
        store = self._store(name)
        head = read_head(store)
        if head is None or head.state != "finished":
            reason = head.reason if head else "no head"
            totals.differences.append(f"{name}: the run failed: {reason}")
            return
        outcome = read_outcome(store, self._target.out)
        totals.steps += len(outcome.steps)
        totals.steps_repeated += outcome.num_steps_done - len(outcome.steps)
        totals.steps_gained += outcome.num_steps_gained
        totals.checkpoints_passed_over += len(outcome.passed_over)
        found = differences(outcome, reference)
        totals.differences += [f"{name}: {why}" for why in found]
        self._say(f"{name}: {'; '.join(found) or 'equal'}")

    def _is_over(self, name: str) -> bool:
        head = read_head(self._store(name))
        return head is not None and head.state in ("finished", "failed")

    def _store(self, name: str) -> Store:
        """Open a run's store once: creating an S3 client takes longer than a step."""
        if name not in self._stores:
            self._stores[name] = open_store(self._uri(name))
        return self._stores[name]

    def _uri(self, name: str) -> str:
        return f"{self._target.runs_uri.rstrip('/')}/{name}"

    def _run_experiment(
        self, name: str, variant: Variant, experiment: Experiment, run_seconds: float
    ) -> list[AttemptResult]:
        def make_request(kill: Kill | None) -> AttemptRequest:
            self._attempt += 1
            self._totals.attempts += 1
            number = f"attempt-{self._attempt:04d}"
            target, is_held = self._target, kill is not None and kill.kind == "held"
            return AttemptRequest(
                workload=target.workload,
                recipe=variant.recipe,
                overrides=dict(target.overrides),
                dataset=str(target.dataset),
                run_uri=self._uri(name),
                num_processes=variant.num_processes,
                interval=variant.interval,
                saving=variant.saving,
                ttl_seconds=target.ttl_seconds,
                budget_seconds=_HELD_BUDGET_SECONDS if is_held else target.budget_seconds,
                folder=str(target.out / "attempts" / name / number),
                writer=number,
                most_seconds=_HANG_SECONDS + 10 * run_seconds,
                kill=kill,
                fault_rate=experiment.fault_rate,
                fault_seed=experiment.fault_seed + self._attempt,
            )

        self._totals.fresh_attempts += experiment.is_fresh
        return run_experiment(experiment, make_request)
