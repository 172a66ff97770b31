"""The small runs of `check`: one uninterrupted, and one interrupted at each of several points.

Each attempt is a new process on a 'new machine': a folder with nothing but access to the store.
"""

import os
import shutil
import signal
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from contract.grammar import Interval
from training.attempt.exit_code import exit_code_of
from training.attempt.launch import StartRank
from training.attempt.supervisor import Supervisor
from training.attempt.world import RankEnvironment
from training.engine.attempt import run_workload
from training.engine.job import ResolvedWorkload, RunOptions, resolve_workload
from training.errors import EXIT_FINISHED, EXIT_INTERRUPTED, UserError
from training.proof.check.shortened import Shortened
from training.proof.torture.compare import Outcome, read_outcome
from training.proof.torture.ranks import ForkedRanks, place_of
from training.record.head import read_head
from training.registry import load_workload
from training.store.open import open_store
from training.workload import Train

_EXIT_CRASHED = 70
# The next attempt waits this long after a kill. It may be short, as no two attempts run at once.
_LEASE_TTL_SECONDS = 2.0
# Steps of a stage after which an attempt gets a notice: the first, one within an epoch, one before
# an evaluation, and one in the second epoch.
_NOTICES = (0, 2, 3, 5)
# Shares of a longer stage's steps after which an attempt is killed: the next one resumes from a
# periodic checkpoint.
_KILLS = (0.45, 0.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptionPoint:
    """Where and how an attempt is interrupted."""

    stage: str
    kind: str  # step, evaluation or shard
    number: int
    how: Literal["interrupted", "killed"] = "interrupted"
    resumed_from: str = ""  # after a kill, once it is known

    def is_reached(self, stage: str, kind: str, number: int) -> bool:
        """Whether this point, or a later one of its kind in the same stage, is reached."""
        return (stage, kind) == (self.stage, self.kind) and number >= self.number

    def __str__(self) -> str:
        what = "evaluation batch" if self.kind == "evaluation" else self.kind
        where = f"{self.how} at stage {self.stage!r}, {what} {self.number + 1}"
        return f"{where}; {self.resumed_from}" if self.resumed_from else where


def points(stages: Sequence[Any], num_steps: int | None) -> list[InterruptionPoint]:
    """Where to interrupt a run, stage by stage; `num_steps` adds kills to Train stages."""
    found = []
    for stage in stages:
        if not isinstance(stage, Train):
            # A notice during the last shard of the run finds nothing left to interrupt.
            if stage.num_shards > 1 or stage is not stages[-1]:
                shard = stage.num_shards // 2
                found.append(InterruptionPoint(stage=stage.name, kind="shard", number=shard))
            continue
        first, *rest = (
            InterruptionPoint(stage=stage.name, kind="step", number=step) for step in _NOTICES
        )
        evaluation = InterruptionPoint(stage=stage.name, kind="evaluation", number=0)
        found += [first, *rest[:-1], evaluation, rest[-1]]
        for share in _KILLS if num_steps else ():
            step = int(share * (num_steps or 0))
            found.append(
                InterruptionPoint(stage=stage.name, kind="step", number=step, how="killed")
            )
    return found


def never_interrupted(
    points: Sequence[InterruptionPoint], reached: Sequence[InterruptionPoint]
) -> list[str]:
    """A sentence for each stage of which no point was reached."""
    stages = dict.fromkeys(point.stage for point in points)
    return [
        f"stage {stage!r} was never interrupted, so nothing is known about it: the run came to "
        "none of its steps, evaluations and shards; if another stage has made what it prepares, "
        "give it a key of its own"
        for stage in stages
        if stage not in {point.stage for point in reached}
    ]


class Runs:
    """Shortened runs of one workload below a folder, each attempt in a process of its own."""

    def __init__(
        self,
        name: str,
        recipe: str,
        overrides: dict[str, str],
        folder: Path,
        interval: Interval,
        num_steps: int | None,
        num_processes: int = 1,
    ) -> None:
        self._name = name
        self._recipe = recipe
        self._overrides = overrides
        self._folder = folder
        self._interval = interval
        self._num_steps = num_steps
        self._num_processes = num_processes
        self._num_attempts = 0
        self.dataset = folder / "dataset"

    def whole(self, name: str) -> Outcome:
        """Make an uninterrupted run."""
        code = self._attempt(name, ())
        if code != EXIT_FINISHED:
            raise UserError(f"a plain run of the workload ended with exit code {code}:{self.log}")
        return self.outcome(name)

    def interrupted(
        self, name: str, points: Sequence[InterruptionPoint]
    ) -> tuple[Outcome, list[InterruptionPoint]]:
        """Make a run whose attempts each end at the first point that is left; return those reached.

        A point that does not exist (a second epoch where there is one) holds up no other.
        """
        left, reached = list(points), list[InterruptionPoint]()
        while (code := self._attempt(name, left)) != EXIT_FINISHED:
            if not self._note.exists():
                raise UserError(f"the last attempt ended with exit code {code}:{self.log}")
            point = left[int(self._note.read_text())]
            if code != (-signal.SIGKILL if point.how == "killed" else EXIT_INTERRUPTED):
                raise UserError(f"{point}: the attempt ended with exit code {code}:{self.log}")
            left.remove(point)
            reached.append(self._with_commit(name, point) if point.how == "killed" else point)
        return self.outcome(name), reached

    def outcome(self, name: str) -> Outcome:
        """Read the results of a run."""
        return read_outcome(open_store(str(self._folder / name)), self._folder / "scratch")

    @property
    def log(self) -> str:
        """The last lines of the last attempt."""
        path = self._folder / f"attempt-{self._num_attempts}.log"
        lines = path.read_text(errors="replace").splitlines()[-12:]
        return "".join(f"\n    {line}" for line in lines)

    def _with_commit(self, name: str, point: InterruptionPoint) -> InterruptionPoint:
        """Add the commit from which the next attempt resumes."""
        head = read_head(open_store(str(self._folder / name)))
        if head is None or not head.checkpoints:
            return replace(point, resumed_from="nothing was committed")
        newest = head.checkpoints[-1]
        where = f"step {newest.step} of the run, epoch {newest.epoch}"
        return replace(point, resumed_from=f"resumes from the {newest.kind} commit at {where}")

    @property
    def _note(self) -> Path:
        """The file in which the last attempt noted the point that ended it."""
        return self._folder / f"attempt-{self._num_attempts}.point"

    def _attempt(self, name: str, points: Sequence[InterruptionPoint]) -> int:
        self._num_attempts += 1
        machine = self._folder / f"machine-{self._num_attempts}"
        pid = os.fork()
        if pid == 0:

            def other(rank: int) -> int:
                return self._act(name, points, machine, rank, None)

            ranks = ForkedRanks(self._num_processes, other)
            os._exit(self._act(name, points, machine, 0, ranks.start))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        shutil.rmtree(machine, ignore_errors=True)
        return code

    def _act(
        self,
        name: str,
        points: Sequence[InterruptionPoint],
        machine: Path,
        rank: int,
        start_rank: StartRank | None,
    ) -> int:
        """Run one rank of the attempt in its process, its output in the attempt's log."""
        with ExitStack() as stack:
            log = (self._folder / f"attempt-{self._num_attempts}.log").open("a")
            stack.enter_context(redirect_stdout(log))
            stack.enter_context(redirect_stderr(log))
            try:
                place = place_of(rank)
                if place is None:
                    return EXIT_FINISHED
                run = self._options(name, points, machine, place, start_rank)
                return exit_code_of(lambda: run_workload(*run))
            except BaseException:  # the child must end here, whatever the workload raises
                traceback.print_exc()
                return _EXIT_CRASHED
            finally:
                log.flush()

    def _options(
        self,
        name: str,
        points: Sequence[InterruptionPoint],
        machine: Path,
        place: RankEnvironment,
        start_rank: StartRank | None,
    ) -> tuple[RunOptions, ResolvedWorkload, Supervisor]:
        supervisor = Supervisor(budget_seconds=600.0)

        def reached(stage: str, kind: str, number: int) -> None:
            found = next(
                (n for n, p in enumerate(points) if p.is_reached(stage, kind, number)), None
            )
            # All ranks come to a step, and the others end with rank 0.
            if found is None or (place.rank and points[found].how == "killed"):
                return
            try:
                with self._note.open("x") as note:
                    note.write(str(found))
            except FileExistsError:
                return
            if points[found].how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            supervisor.interruption.tell("notice")

        options = RunOptions(
            workload=self._name,
            recipe=self._recipe,
            overrides=self._overrides,
            dataset_uri=str(self.dataset),
            store=open_store(str(self._folder / name)),
            run_id=name,
            interval=self._interval,
            lease_ttl_seconds=_LEASE_TTL_SECONDS,
            writer=f"attempt-{self._num_attempts}",
            scratch=machine,
            environment=place,
            num_processes=self._num_processes,
            start_rank=start_rank,
        )
        workload = Shortened(load_workload(self._name), reached, self._num_steps)
        return options, resolve_workload(options, workload), supervisor
