"""The totals of a torture, and which exits of an attempt are unexpected."""

import signal
from collections import Counter
from dataclasses import dataclass, field

from training.attempt.hosts import LATE
from training.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LEASE_LOST,
    EXIT_STORE,
)
from training.proof.attempt import EXIT_CRASHED
from training.proof.experiment import AttemptResult
from training.proof.injector import SIGNALS, Kill
from training.proof.torture.plan import Size

_EXPECTED_EXITS = (EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_LEASE_LOST)


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


def unexpected_exit(attempt: AttemptResult, *, is_store_faulty: bool) -> list[str]:
    """Unexpected facts about an attempt's end, as ends of sentences."""
    wrong = [f"left rank {rank} running ({attempt.folder})" for rank in attempt.outlived_by]
    is_excused = attempt.code in (EXIT_FAILED, EXIT_STORE) and (
        is_store_faulty
        or attempt.num_faults > 0
        or _lost_a_rank(attempt)
        # On a busy machine the others may take longer to begin than they are waited for.
        or LATE in attempt.log
    )
    if attempt.code not in _EXPECTED_EXITS and not is_excused and not _is_killed(attempt):
        what = "crashed" if attempt.code == EXIT_CRASHED else f"ended with {attempt.code}"
        last = attempt.log.strip().splitlines()[-1:] or [""]
        wrong.append(f"{what}: {last[0]} ({attempt.folder})")
    return wrong


def summary_of(attempt: AttemptResult) -> str:
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
    """What ended an attempt after a dated notice."""
    return attempt.follow_up[-1].name if attempt.follow_up else "itself"


def _ranks(kill: Kill) -> str:
    if kill.target_rank is None:
        return "all ranks"
    if kill.on_host:
        return f"host {kill.target_rank // kill.on_host}"
    return f"rank {kill.target_rank}"
