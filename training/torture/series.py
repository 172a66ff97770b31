"""Runs tortured one after another until the kills are used up, each compared when it is done."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from training.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_LEASE_LOST, UserError
from training.head import read_head
from training.store import Store, open_store
from training.torture.attempt import EXIT_CRASHED, Asked
from training.torture.compare import (
    Outcome,
    broken_promises,
    differences,
    read_outcome,
    sample_problems,
)
from training.torture.plan import SIGNALS, Scene, Trouble, draw_scene
from training.torture.scene import Ended, play

_MOST_KILLS_OF_ONE_RUN = 12
_FRESH_ONE_IN = 10
# An attempt left in peace ends the run; more than one is needed where a killed one holds the lease.
_MOST_QUIET_ATTEMPTS = 3
_HANG_SECONDS = 120.0
_ENDINGS = (EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_LEASE_LOST)


@dataclass(slots=True)
class Tally:
    """What was done and what came of it."""

    kills: int = 0
    runs: int = 0
    attempts: int = 0
    fresh_attempts: int = 0
    faults: int = 0
    steps: int = 0
    steps_repeated: int = 0
    checkpoints_passed_over: int = 0
    by_kind_and_phase: Counter[tuple[str, str]] = field(default_factory=Counter)
    exit_codes: Counter[int] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is tortured, and where."""

    workload: str
    recipe: str
    overrides: Mapping[str, str]
    dataset: Path
    runs_uri: str
    interval: str
    ttl_seconds: float
    budget_seconds: float
    out: Path


class Series:
    """One seed's runs. `say` is called with one line after every scene."""

    def __init__(self, target: Target, seed: int, tally: Tally, say: Callable[[str], None]) -> None:
        self._target = target
        self._seed = seed
        self._rng = random.Random(seed)
        self._tally = tally
        self._say = say
        self._stores: dict[str, Store] = {}
        self._attempt = 0
        self._whole: Outcome | None = None
        self._run_seconds = 1.0

    def go(self, kills: int) -> None:
        """Torture runs until so many more kills have met an attempt alive."""
        end = self._tally.kills + kills
        self._whole = self._undisturbed()
        number = 0
        while self._tally.kills < end:
            number += 1
            self._torture(f"seed-{self._seed}-run-{number:03d}", end)

    def _undisturbed(self) -> Outcome:
        name = f"seed-{self._seed}-whole"
        ended = self._play(name, Scene())[0]
        if ended.code != EXIT_FINISHED:
            last = ended.log.strip().splitlines()[-1:] or ["it said nothing"]
            raise UserError(
                f"the workload does not run undisturbed (exit code {ended.code}): {last[0]}"
            )
        self._run_seconds = ended.seconds
        store = self._store(name)
        outcome = read_outcome(store, self._target.out)
        self._tally.differences += [f"{name}: {why}" for why in sample_problems(outcome)]
        self._say(f"{name}: {len(outcome.steps)} steps in {ended.seconds:.2f} s")
        return outcome

    def _torture(self, name: str, end: int) -> None:
        """One run: killed, at most so often, until it is finished; then compared."""
        tally, kills = self._tally, 0
        known: dict[str, bool] = {}
        tally.runs += 1
        while kills < _MOST_KILLS_OF_ONE_RUN and tally.kills < end and not self._is_over(name):
            scene = draw_scene(
                self._rng,
                run_seconds=self._run_seconds,
                ttl_seconds=self._target.ttl_seconds,
                is_fresh=(self._attempt + 1) % _FRESH_ONE_IN == 0,
            )
            ended = self._play(name, scene)
            self._judge(name, ended, known)
            kills += sum(1 for attempt in ended if attempt.kind)
            self._say(f"{name}: " + ", ".join(_told(attempt) for attempt in ended))
        for _ in range(_MOST_QUIET_ATTEMPTS):
            if self._is_over(name):
                break
            ended = self._play(name, Scene())
            self._judge(name, ended, known)
        self._compare(name)

    def _judge(self, name: str, ended: list[Ended], known: dict[str, bool]) -> None:
        """Count what came, and find what must never come."""
        tally = self._tally
        for attempt in ended:
            tally.exit_codes[attempt.code] += 1
            tally.faults += attempt.num_faults
            if attempt.kind and attempt.hit_phase:
                tally.kills += 1
                tally.by_kind_and_phase[attempt.kind, attempt.hit_phase] += 1
            # Of a store on the network nobody can say that it did nothing wrong.
            is_store_faulty = attempt.num_faults or self._target.runs_uri.startswith("s3://")
            is_excused = attempt.code == EXIT_FAILED and is_store_faulty
            if attempt.code not in _ENDINGS and not is_excused and not _is_killed(attempt):
                what = "crashed" if attempt.code == EXIT_CRASHED else f"ended with {attempt.code}"
                last = attempt.log.strip().splitlines()[-1:] or [""]
                tally.differences.append(f"{name}: an attempt {what}: {last[0]} ({attempt.folder})")
        broken = broken_promises(self._store(name), known)
        for why in broken:
            if f"{name}: {why}" not in tally.differences:
                tally.differences.append(f"{name}: {why}")

    def _compare(self, name: str) -> None:
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
        tally.checkpoints_passed_over += len(outcome.passed_over)
        assert self._whole is not None
        found = differences(outcome, self._whole)
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

    def _play(self, name: str, scene: Scene) -> list[Ended]:
        def ask(trouble: Trouble | None) -> Asked:
            self._attempt += 1
            self._tally.attempts += 1
            number = f"attempt-{self._attempt:04d}"
            target = self._target
            return Asked(
                workload=target.workload,
                recipe=target.recipe,
                overrides=dict(target.overrides),
                dataset=str(target.dataset),
                run_uri=self._uri(name),
                interval=target.interval,
                ttl_seconds=target.ttl_seconds,
                budget_seconds=target.budget_seconds,
                folder=str(target.out / "attempts" / name / number),
                writer=number,
                most_seconds=_HANG_SECONDS + 10 * self._run_seconds,
                trouble=trouble,
                fault_rate=scene.fault_rate,
                fault_seed=scene.fault_seed + self._attempt,
            )

        self._tally.fresh_attempts += scene.is_fresh
        return play(scene, ask)


def _is_killed(attempt: Ended) -> bool:
    """Whether the signal itself ended it, as SIGKILL does, and others before there is a handler."""
    if attempt.kind is None or attempt.code != -SIGNALS[attempt.kind]:
        return False
    return attempt.kind in ("kill", "rival") or attempt.hit_phase == "start-up"


def _told(attempt: Ended) -> str:
    how = f"{attempt.kind} in {attempt.hit_phase}" if attempt.kind else "not met"
    faults = f", {attempt.num_faults} store faults" if attempt.num_faults else ""
    return f"{how}{faults}, exit {attempt.code}"
