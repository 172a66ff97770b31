"""What a torture has done and what came of it, and which endings of an attempt are none to have."""

import signal
from collections import Counter
from dataclasses import dataclass, field

from training.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_LEASE_LOST
from training.proof.torture.attempt import EXIT_CRASHED
from training.proof.torture.choice import Choice
from training.proof.torture.plan import SIGNALS
from training.proof.torture.scene import Ended

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
    dated_notices: int = 0
    dated_trained_on: int = 0
    dated_ended_by: Counter[str] = field(default_factory=Counter)
    steps_gained: int = 0  # after a dated notice, and kept
    by_kind_and_phase: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_kind_and_ranks: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs_with: dict[str, Counter[str]] = field(default_factory=dict)
    exit_codes: Counter[int] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def count(self, attempt: Ended, choice: Choice) -> None:
        """Add one attempt of a run."""
        self.exit_codes[attempt.code] += 1
        self.faults += attempt.num_faults
        if attempt.kind and attempt.hit_phase:
            self.kills += 1
            self.by_kind_and_phase[attempt.kind, attempt.hit_phase] += 1
            if choice.num_processes > 1:
                self.by_kind_and_ranks[attempt.kind, _ranks(attempt.aim)] += 1
        if attempt.kind == "dated":
            self.dated_notices += 1
            self.dated_trained_on += attempt.trained_on
            self.dated_ended_by[_ended_by(attempt)] += 1


def wrong_ending(attempt: Ended, *, is_store_faulty: bool) -> list[str]:
    """What is wrong with how an attempt ended, as the end of a sentence."""
    wrong = [f"left rank {rank} running ({attempt.folder})" for rank in attempt.outlived_by]
    is_excused = attempt.code == EXIT_FAILED and (
        is_store_faulty or attempt.num_faults > 0 or _lost_a_rank(attempt)
    )
    if attempt.code not in _ENDINGS and not is_excused and not _is_killed(attempt):
        what = "crashed" if attempt.code == EXIT_CRASHED else f"ended with {attempt.code}"
        last = attempt.log.strip().splitlines()[-1:] or [""]
        wrong.append(f"{what}: {last[0]} ({attempt.folder})")
    return wrong


def told(attempt: Ended) -> str:
    """An attempt in a few words."""
    how = "not met"
    if attempt.kind:
        how = f"{attempt.kind} of {_ranks(attempt.aim)} in {attempt.hit_phase}"
    if attempt.trained_on:
        how += f", trained on, ended by {_ended_by(attempt)}"
    faults = f", {attempt.num_faults} store faults" if attempt.num_faults else ""
    return f"{how}{faults}, exit {attempt.code}"


def _is_killed(attempt: Ended) -> bool:
    """Whether the signal itself ended it, as SIGKILL does, and others before there is a handler."""
    if attempt.kind is None or attempt.aim:
        return False
    if attempt.code in (-number for number in attempt.aftermath):
        return attempt.code == -signal.SIGKILL
    if attempt.code != -SIGNALS[attempt.kind]:
        return False
    return attempt.kind in ("kill", "rival") or attempt.hit_phase == "start-up"


def _lost_a_rank(attempt: Ended) -> bool:
    """Whether the signal ended another rank, without which rank 0 cannot go on.

    One that is held, or has a short notice, ends itself, before rank 0 has heard of a notice that
    only the other one got; and the end of a dated notice ends it in any case.
    """
    is_ended = attempt.kind in ("kill", "rival", "held", "dated") or attempt.hit_phase == "start-up"
    return attempt.kind is not None and attempt.aim != 0 and is_ended


def _ended_by(attempt: Ended) -> str:
    """What ended an attempt that got a dated notice."""
    return attempt.aftermath[-1].name if attempt.aftermath else "itself"


def _ranks(aim: int | None) -> str:
    return "all ranks" if aim is None else f"rank {aim}"
