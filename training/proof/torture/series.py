"""Runs tortured one after another until the kills are used up, each compared when it is done."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from training.errors import EXIT_FINISHED, UserError
from training.proof.torture.attempt import AttemptRequest
from training.proof.torture.choice import Choice, Choices, Deck
from training.proof.torture.compare import (
    Outcome,
    broken_promises,
    differences,
    read_outcome,
    sample_problems,
)
from training.proof.torture.plan import KINDS, Scene, Trouble, draw_scene
from training.proof.torture.scene import Ended, play
from training.proof.torture.tally import Tally, told, wrong_ending
from training.record.head import read_head
from training.store.open import open_store
from training.store.protocol import Store

_MOST_KILLS_OF_ONE_RUN = 12
_FRESH_ONE_IN = 10
# An attempt left in peace ends the run; more than one is needed where a killed one holds the lease.
_MOST_QUIET_ATTEMPTS = 3
_HANG_SECONDS = 120.0
# Short enough for a held attempt not to hold up the series; long enough for a small save.
_HELD_BUDGET_SECONDS = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is tortured, and where."""

    workload: str
    recipes: Sequence[str]
    num_processes: Sequence[int]
    intervals: Sequence[str]
    overrides: Mapping[str, str]
    dataset: Path
    runs_uri: str
    ttl_seconds: float
    budget_seconds: float
    is_one_enough: bool  # whether the first run that differs ends the torture
    out: Path


class Whole:
    """The uninterrupted run of one recipe and number of ranks."""

    def __init__(self, outcome: Outcome, seconds: float) -> None:
        self.outcome = outcome
        self.seconds = seconds


# By recipe and number of ranks; every seed's runs are held against the same.
Wholes: TypeAlias = dict[tuple[str, int], Whole]


class Series:
    """One seed's runs. `say` is called with one line after every scene."""

    def __init__(
        self,
        target: Target,
        seed: int,
        tally: Tally,
        wholes: Wholes,
        say: Callable[[str], None],
    ) -> None:
        self._target = target
        self._seed = seed
        self._rng = random.Random(seed)
        self._tally = tally
        self._wholes = wholes
        self._say = say
        self._choices = Choices(
            self._rng,
            recipes=target.recipes,
            num_processes=target.num_processes,
            intervals=target.intervals,
        )
        self._kinds = Deck(self._rng, list(Counter(KINDS).elements()))
        self._stores: dict[str, Store] = {}
        self._attempt = 0

    def go(self, kills: int) -> None:
        """Torture runs until so many more kills have met an attempt alive."""
        end = self._tally.kills + kills
        number = 0
        while self._tally.kills < end and not self._is_enough:
            number += 1
            self._torture(f"seed-{self._seed}-run-{number:03d}", self._choices.draw(), end)

    @property
    def _is_enough(self) -> bool:
        return self._target.is_one_enough and bool(self._tally.differences)

    def _whole(self, choice: Choice) -> Whole:
        key = choice.recipe, choice.num_processes
        if key not in self._wholes:
            self._wholes[key] = self._undisturbed(choice)
        return self._wholes[key]

    def _undisturbed(self, choice: Choice) -> Whole:
        name = f"seed-{self._seed}-whole-{choice.recipe}-{choice.num_processes}"
        ended = self._play(name, choice, Scene(), 0.0)[0]
        if ended.code != EXIT_FINISHED:
            last = ended.log.strip().splitlines()[-1:] or ["it said nothing"]
            raise UserError(
                f"the workload does not run undisturbed (exit code {ended.code}): {last[0]}"
            )
        outcome = read_outcome(self._store(name), self._target.out)
        self._tally.differences += [f"{name}: {why}" for why in sample_problems(outcome)]
        self._say(f"{name}: {len(outcome.steps)} steps in {ended.seconds:.2f} s")
        return Whole(outcome, ended.seconds)

    def _torture(self, name: str, choice: Choice, end: int) -> None:
        """One run: killed, at most so often, until it is finished; then compared."""
        tally, kills, whole = self._tally, 0, self._whole(choice)
        known: dict[str, bool] = {}
        tally.runs += 1
        for what, card in choice.cards.items():
            tally.runs_with.setdefault(what, Counter())[card] += 1
        self._say(f"{name}: {', '.join(f'{what} {card}' for what, card in choice.cards.items())}")
        while kills < _MOST_KILLS_OF_ONE_RUN and tally.kills < end and not self._is_over(name):
            kind = self._kinds.draw()
            scene = draw_scene(
                self._rng,
                kind,
                run_seconds=whole.seconds,
                ttl_seconds=self._target.ttl_seconds,
                is_fresh=(self._attempt + 1) % _FRESH_ONE_IN == 0,
                num_processes=choice.num_processes,
            )
            ended = self._play(name, choice, scene, whole.seconds)
            self._judge(name, choice, ended, known)
            kills += sum(1 for attempt in ended if attempt.kind)
            if ended[0].kind is None:
                self._kinds.put_back(kind)  # it met nobody alive
            self._say(f"{name}: " + ", ".join(told(attempt) for attempt in ended))
        for _ in range(_MOST_QUIET_ATTEMPTS):
            if self._is_over(name):
                break
            ended = self._play(name, choice, Scene(), whole.seconds)
            self._judge(name, choice, ended, known)
        self._compare(name, whole.outcome)

    def _judge(self, name: str, choice: Choice, ended: list[Ended], known: dict[str, bool]) -> None:
        """Count what came, and find what must never come."""
        # Of a store on the network nobody can say that it did nothing wrong.
        is_store_faulty = self._target.runs_uri.startswith("s3://")
        for attempt in ended:
            self._tally.count(attempt, choice)
            wrong = wrong_ending(attempt, is_store_faulty=is_store_faulty)
            self._tally.differences += [f"{name}: an attempt {why}" for why in wrong]
        for why in broken_promises(self._store(name), known):
            if f"{name}: {why}" not in self._tally.differences:
                self._tally.differences.append(f"{name}: {why}")

    def _compare(self, name: str, whole: Outcome) -> None:
        tally = self._tally
        if not self._is_over(name):
            tally.differences.append(f"{name}: the run did not come to its end")
            return
        store = self._store(name)
        head = read_head(store)
        if head is None or head.state != "finished":
            reason = head.reason if head else "no head"
            tally.differences.append(f"{name}: the run failed: {reason}")
            return
        outcome = read_outcome(store, self._target.out)
        tally.steps += len(outcome.steps)
        tally.steps_repeated += outcome.num_steps_done - len(outcome.steps)
        tally.steps_gained += outcome.num_steps_gained
        tally.checkpoints_passed_over += len(outcome.passed_over)
        found = differences(outcome, whole)
        tally.differences += [f"{name}: {why}" for why in found]
        self._say(f"{name}: {'; '.join(found) or 'equal'}")

    def _is_over(self, name: str) -> bool:
        head = read_head(self._store(name))
        return head is not None and head.state in ("finished", "failed")

    def _store(self, name: str) -> Store:
        """Opened once: to make an S3 client costs more than a step."""
        if name not in self._stores:
            self._stores[name] = open_store(self._uri(name))
        return self._stores[name]

    def _uri(self, name: str) -> str:
        return f"{self._target.runs_uri.rstrip('/')}/{name}"

    def _play(self, name: str, choice: Choice, scene: Scene, run_seconds: float) -> list[Ended]:
        def ask(trouble: Trouble | None) -> AttemptRequest:
            self._attempt += 1
            self._tally.attempts += 1
            number = f"attempt-{self._attempt:04d}"
            target, is_held = self._target, trouble is not None and trouble.kind == "held"
            return AttemptRequest(
                workload=target.workload,
                recipe=choice.recipe,
                overrides=dict(target.overrides),
                dataset=str(target.dataset),
                run_uri=self._uri(name),
                num_processes=choice.num_processes,
                interval=choice.interval,
                saving=choice.saving,
                ttl_seconds=target.ttl_seconds,
                budget_seconds=_HELD_BUDGET_SECONDS if is_held else target.budget_seconds,
                folder=str(target.out / "attempts" / name / number),
                writer=number,
                most_seconds=_HANG_SECONDS + 10 * run_seconds,
                trouble=trouble,
                fault_rate=scene.fault_rate,
                fault_seed=scene.fault_seed + self._attempt,
            )

        self._tally.fresh_attempts += scene.is_fresh
        return play(scene, ask)
