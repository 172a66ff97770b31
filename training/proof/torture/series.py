"""Tortures runs one after another until the kills are used up, and compares each finished run."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from training.errors import EXIT_FINISHED, EXIT_STORE, UserError
from training.proof.attempt import AttemptRequest
from training.proof.compare import (
    RunOutcome,
    broken_promises,
    differences,
    read_outcome,
    sample_problems,
)
from training.proof.experiment import AttemptResult, Experiment, run_experiment
from training.proof.injector import Kill, Kind
from training.proof.torture.plan import KINDS, SAVINGS, Deck, Size, Variant, draw_experiment
from training.proof.torture.totals import Totals, summary_of, unexpected_exit
from training.record.head import read_head
from training.store.folder import open_store
from training.store.protocol import Store

_MOST_KILLS_OF_ONE_RUN = 12
_FRESH_ONE_IN = 10
# One undisturbed attempt finishes the run, or more if a killed one still holds the lease.
_MOST_UNDISTURBED_ATTEMPTS = 3
_REFERENCE_ATTEMPTS = 3
_HANG_SECONDS = 120.0
# Of an uninterrupted run, before one has shown it: a tenth of what it may take.
_USUAL_SECONDS = 60.0
# Short enough for a held attempt not to delay the series; long enough for a small save.
_HELD_BUDGET_SECONDS = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What to torture, and where: `request` has what all attempts share."""

    request: AttemptRequest
    recipes: Sequence[str]
    sizes: Sequence[Size]
    depends_on_ranks: Callable[[str], bool]  # whether the bits of a recipe's results do
    intervals: Sequence[str]
    runs_uri: str
    stops_at_first: bool  # whether the first run that differs ends the torture
    out: Path


@dataclass(kw_only=True)
class Torture:
    """Runs of several seeds; `say` is called with one line after every experiment."""

    target: Target
    say: Callable[[str], None]
    totals: Totals = field(default_factory=Totals)
    drawn: int = 0  # kills, of which some hit no live attempt
    # The uninterrupted run and its seconds, by recipe, and number of ranks where that matters.
    _references: dict[tuple[str, int], tuple[RunOutcome, float]] = field(default_factory=dict)
    _stores: dict[str, Store] = field(default_factory=dict)
    _attempts: int = 0

    def go(self, seed: int, kills: int) -> None:
        """Torture runs until `kills` more kills have hit a live attempt."""
        rng, target = random.Random(seed), self.target
        recipes, sizes = Deck(rng, target.recipes), Deck(rng, target.sizes)
        intervals, savings = Deck(rng, target.intervals), Deck(rng, SAVINGS)
        kinds = Deck(rng, list(Counter(KINDS).elements()))
        end, number = self.totals.kills + kills, 0
        while self.totals.kills < end and not (target.stops_at_first and self.totals.differences):
            number += 1
            recipe = recipes.draw()
            is_fixed = target.depends_on_ranks(recipe)
            variant = Variant(
                recipe=recipe,
                sizes=(sizes.draw(),) if is_fixed else tuple(target.sizes),
                interval=intervals.draw(),
                saving=savings.draw(),
            )
            reference, seconds = self._reference(f"seed-{seed}", variant)
            run = _Run(self, f"seed-{seed}-run-{number:03d}", variant, seconds)
            run.torture(rng, kinds, Deck(rng, variant.sizes) if is_fixed else sizes, end)
            run.compare(reference)

    def _reference(self, prefix: str, variant: Variant) -> tuple[RunOutcome, float]:
        ranks = variant.sizes[0].ranks if self.target.depends_on_ranks(variant.recipe) else 1
        key = variant.recipe, ranks
        if key not in self._references:
            name = f"{prefix}-reference-{variant.recipe}-{ranks}"
            self._references[key] = self._run_reference(name, variant, Size(ranks))
        return self._references[key]

    def _run_reference(self, name: str, variant: Variant, size: Size) -> tuple[RunOutcome, float]:
        run = _Run(self, name, variant, _USUAL_SECONDS)
        (result,) = run.experiment(Experiment(), size)
        for again in range(2, _REFERENCE_ATTEMPTS + 1):
            if result.code != EXIT_STORE:
                break
            # The store failed: start another run, since one that resumes cannot be the reference.
            run = _Run(self, f"{name}-{again}", variant, _USUAL_SECONDS)
            (result,) = run.experiment(Experiment(), size)
        if result.code != EXIT_FINISHED:
            last = result.log.strip().splitlines()[-1:] or ["without output"]
            raise UserError(
                f"the workload fails even without kills (exit code {result.code}): {last[0]}"
            )
        outcome = read_outcome(self.store(run.name), self.target.out)
        self.totals.differences += [f"{name}: {why}" for why in sample_problems(outcome)]
        self.say(f"{name}: {len(outcome.steps)} steps in {result.seconds:.2f} s")
        return outcome, result.seconds

    def store(self, name: str) -> Store:
        """Open a run's store once: creating an S3 client takes longer than a step."""
        if name not in self._stores:
            self._stores[name] = open_store(self.uri(name))
        return self._stores[name]

    def uri(self, name: str) -> str:
        """The URI of a run."""
        return f"{self.target.runs_uri.rstrip('/')}/{name}"

    def next_attempt(self) -> int:
        """The number of the next attempt of all."""
        self._attempts += 1
        self.totals.attempts += 1
        return self._attempts


class _Run:
    """One run: killed until it is finished or has had its share."""

    def __init__(self, torture: Torture, name: str, variant: Variant, seconds: float) -> None:
        self.name = name
        self._torture = torture
        self._target = torture.target
        self._totals = torture.totals
        self._variant = variant
        self._seconds = seconds  # of the uninterrupted run
        self._known: dict[str, bool] = {}

    def torture(self, rng: random.Random, kinds: Deck[Kind], sizes: Deck[Size], end: int) -> None:
        """Kill it, until all runs together have had `end` kills; then let it finish."""
        totals, kills = self._totals, 0
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
                ttl_seconds=self._target.request.ttl_seconds,
                is_fresh=self._torture.drawn % _FRESH_ONE_IN == 0,
                size=size,
            )
            results = self._checked(experiment, size)
            kills += sum(1 for attempt in results if attempt.kill)
            if results[0].kill is None:
                kinds.put_back(kind)  # it hit no live attempt
            said = ", ".join(summary_of(attempt) for attempt in results)
            self._say(f"{size} rank{'s' * (size.ranks > 1)}: {said}")
        for _ in range(_MOST_UNDISTURBED_ATTEMPTS):
            if not self._is_over:
                self._checked(Experiment(), sizes.draw())

    def compare(self, reference: RunOutcome) -> None:
        """Compare the finished run with the uninterrupted one."""
        totals, head = self._totals, read_head(self._store)
        if not self._is_over:
            self._differs(["the run did not finish"])
            return
        if head is None or head.state != "finished":
            self._differs([f"the run failed: {head.reason if head else 'no head'}"])
            return
        outcome = read_outcome(self._store, self._target.out)
        totals.steps += len(outcome.steps)
        totals.steps_repeated += outcome.num_steps_done - len(outcome.steps)
        totals.steps_gained += outcome.num_steps_gained
        totals.checkpoints_passed_over += len(outcome.passed_over)
        found = differences(outcome, reference)
        self._differs(found)
        self._say("; ".join(found) or "equal")

    def experiment(self, experiment: Experiment, size: Size) -> list[AttemptResult]:
        """Run one or two attempts of this size."""
        target, variant = self._target, self._variant

        def make_request(kills: tuple[Kill, ...]) -> AttemptRequest:
            number = self._torture.next_attempt()
            is_held = any(kill.kind == "held" for kill in kills)
            return replace(
                target.request,
                recipe=variant.recipe,
                run_uri=self._torture.uri(self.name),
                num_processes=size.ranks,
                num_hosts=size.hosts,
                interval=variant.interval,
                saving=variant.saving,
                budget_seconds=_HELD_BUDGET_SECONDS if is_held else target.request.budget_seconds,
                folder=str(target.out / "attempts" / self.name / f"attempt-{number:04d}"),
                writer=f"attempt-{number:04d}",
                most_seconds=_HANG_SECONDS + 10 * self._seconds,
                kills=kills,
                fault_rate=experiment.fault_rate,
                fault_seed=experiment.fault_seed + number,
            )

        self._totals.fresh_attempts += experiment.is_fresh
        return run_experiment(experiment, make_request)

    def _checked(self, experiment: Experiment, size: Size) -> list[AttemptResult]:
        """Run and count the attempts, and find what must never happen."""
        results = self.experiment(experiment, size)
        # A store on the network may have failed by itself.
        is_store_faulty = self._target.runs_uri.startswith("s3://")
        for attempt in results:
            self._totals.count(attempt, size)
            wrong = unexpected_exit(attempt, is_store_faulty=is_store_faulty)
            self._differs([f"an attempt {why}" for why in wrong])
        self._differs(broken_promises(self._store, self._known))
        return results

    def _differs(self, found: Sequence[str]) -> None:
        said = (f"{self.name}: {why}" for why in found)
        self._totals.differences += [why for why in said if why not in self._totals.differences]

    def _say(self, line: str) -> None:
        self._torture.say(f"{self.name}: {line}")

    @property
    def _store(self) -> Store:
        return self._torture.store(self.name)

    @property
    def _is_over(self) -> bool:
        head = read_head(self._store)
        return head is not None and head.state in ("finished", "failed")
