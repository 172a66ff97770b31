"""A program's runs for `check --program`: to its end, and interrupted where it may hurt most.

Each attempt is a new process with a new root, and has nothing but the run's store.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from contract.keys import RECEIPT
from training.errors import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USER, UserError
from training.proof.compare import ProgramRun, losses_by_step
from training.proof.machine import live, recorded, run_command
from training.record.head import read_head
from training.record.history import read_history
from training.record.metrics import read_events
from training.save.listing import SnapshotError, list_folder
from training.save.quiet import QuietTime
from training.store.open import open_store
from training.store.protocol import Store

# A notice shall come while a save is being written.
_NOTICE_POLL_SECONDS = 0.02
# Of a notice: time for a save, and not the two minutes that a program without a handler waits for.
_NOTICE_SECONDS = 20


@dataclass(kw_only=True, slots=True)
class _Interruption:
    """What ended an attempt, and what that cost."""

    what: str
    attempt: int
    step: int  # that the program had come to
    is_late: bool  # the program had had the time to save
    seconds_lost: float | None = None  # since what the snapshot holds from which it was resumed
    costs_all: bool = False  # in spite of that, nothing was there to resume from
    why: str | None = None  # what had kept the folder from being snapshotted
    steps_redone: int | None = None  # None: its metrics name no step


class _Attempt:
    """What can be seen of an attempt while it runs."""

    def __init__(self, number: int, metrics: Path, folder: Path) -> None:
        self.number = number
        self.began: float | None = None  # unix seconds: it had restored, and its program started
        self.step, self.has_snapshot = 0, False
        self._metrics = metrics
        self._quiet = QuietTime()
        self._folder = folder

    def look(self) -> float:
        """Read what it has written; return for how many seconds it has been running."""
        num_begun = 0
        for record in recorded(self._metrics):
            if record["kind"] == "resume":
                # A resumed attempt shall lose something too: a commit of its own counts.
                num_begun, self.has_snapshot = num_begun + 1, False
            elif record["kind"] == "step":
                self.step = int(record["step"])
            elif record["kind"] == "commit":
                self.has_snapshot = True
        if self.began is None and num_begun == self.number:
            self.began = time.time()
        return 0.0 if self.began is None else time.time() - self.began

    def is_saving(self) -> bool:
        """Whether something in its folder has changed since the last look."""
        before = self._quiet.listing
        with suppress(SnapshotError):
            self._quiet.look(list_folder(self._folder))
        now = self._quiet.listing
        return before is not None and now is not None and before.difference(now) is not None

    def obstacle(self) -> str | None:
        """What keeps its folder from being snapshotted, as a clause."""
        self.is_saving()
        if (listing := self._quiet.listing) is None or listing.is_empty:
            return "it has saved nothing by then"
        if not self._quiet.is_closed() and (held := self._quiet.found_open) is not None:
            return f"{held} stays open for writing"
        seconds = time.time() - listing.written_ns / 1e9
        return f"{listing.newest!r} changed {seconds:.1f} s before"


class ProgramRuns:
    """Starts `python -m training run` as often as a run needs it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._interruptions: list[_Interruption] = []
        self._folder = folder
        self._given = list(_given(options))
        self._num_attempts = 0

    def run(self, name: str) -> ProgramRun:
        """A run to its end."""
        began, self._num_attempts = time.monotonic(), 0
        self._finish(name)
        return self._read(name, time.monotonic() - began)

    def interrupted(self, name: str, whole: ProgramRun, num_kills: int) -> ProgramRun:
        """A run that is killed before a snapshot, after each equal share, noticed, and finished."""
        began, self._num_attempts = time.monotonic(), 0
        first, last = whole.snapshot_seconds, max(whole.losses, default=0)
        share = whole.seconds / (num_kills + 1)
        early = (share if first is None else first) / 2

        def is_done(attempt: _Attempt, kill: int) -> bool:
            seconds, step = attempt.look(), last * kill / (num_kills + 1)
            is_there = attempt.step >= step if step else seconds >= share
            return bool(seconds) and is_there and (attempt.has_snapshot or first is None)

        self._kill(name, "before its first snapshot", False, lambda one: one.look() >= early)
        for kill in range(1, num_kills + 1):
            self._kill(name, "later", True, partial(is_done, kill=kill))
        self._notice(name)
        self._finish(name)
        run = self._read(name, time.monotonic() - began)
        lines = recorded(self._metrics_file(name))
        begun = [int(line["step"]) for line in lines if line["kind"] == "resume"]
        for one in self._interruptions:
            if (last or one.step) and one.attempt < len(begun):
                one.steps_redone = max(0, one.step - begun[one.attempt])
            if one.seconds_lost is None:
                one.seconds_lost = run.interruptions[one.attempt - 1]["seconds_lost"]
        return replace(run, interruptions=[asdict(one) for one in self._interruptions])

    def _kill(
        self, name: str, when: str, is_late: bool, is_lost: Callable[[_Attempt], bool]
    ) -> None:
        attempt = self._next(name)
        obstacle: list[str | None] = []

        def kill() -> bool:
            if is_lost(attempt):
                obstacle.append(attempt.obstacle())
            return bool(obstacle)

        if self._live(name, attempt, is_lost=kill) != -signal.SIGKILL or not obstacle:
            return  # it was faster
        assert attempt.began is not None
        store = open_store(self._uri(name))
        written = [event["written_at"] for event in read_events(store, "committed")]
        head = read_head(store)
        costs_all = is_late and (head is None or not head.checkpoints)
        self._interruptions.append(
            _Interruption(
                what=f"killed {when}",
                attempt=attempt.number,
                step=attempt.step,
                is_late=is_late,
                seconds_lost=time.time() - max([attempt.began, *written]),
                costs_all=costs_all,
                why=obstacle[0] if costs_all else None,
            )
        )

    def _notice(self, name: str) -> None:
        attempt = self._next(name)

        pids: list[int] = []

        def notice() -> bool:
            if pids and (attempt.began or attempt.look()) and attempt.is_saving():
                os.kill(pids.pop(), signal.SIGUSR1)
            return False

        seconds = f"--notice-budget-seconds={_NOTICE_SECONDS}"
        code = self._live(
            *(name, attempt, seconds),
            is_lost=notice,
            began=pids.append,
            poll_seconds=_NOTICE_POLL_SECONDS,
        )
        if code == EXIT_INTERRUPTED:
            attempt.look()
            what, number = "a notice inside a save", attempt.number
            self._interruptions.append(
                _Interruption(what=what, attempt=number, step=attempt.step, is_late=False)
            )

    def _finish(self, name: str) -> None:
        code = self._live(name, self._next(name))
        if code != EXIT_FINISHED:
            self._fail(name, code)

    def _next(self, name: str) -> _Attempt:
        self._num_attempts += 1
        folder = self._machine(name, self._num_attempts) / "ml" / "checkpoints"
        return _Attempt(self._num_attempts, self._metrics_file(name), folder)

    def _live(self, name: str, attempt: _Attempt, *options: str, **when: Any) -> int:
        machine = self._machine(name, attempt.number)
        machine.mkdir(parents=True)
        more = [f"--metrics-file={self._metrics_file(name)}", f"--writer=machine-{attempt.number}"]
        command = run_command(machine, self._uri(name), [*self._given, *options, *more])
        return live(command, self._log(name), **when)

    def _fail(self, name: str, code: int) -> NoReturn:
        lines = self._log(name).read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        said = (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")
        if code == EXIT_USER:
            raise UserError(said)
        when = "after an interruption" if self._interruptions else "without any interruption"
        raise UserError(f"the program failed {when} (exit code {code}): {said}")

    def _read(self, name: str, seconds: float) -> ProgramRun:
        store = open_store(self._uri(name))
        found = store.get(RECEIPT)
        assert found is not None, "a finished run has a receipt"
        receipt = json.loads(found.data)
        return ProgramRun(
            losses=losses_by_step(read_history(store).lines),
            files=receipt["final_files"],
            interruptions=receipt["interruptions"],
            seconds=seconds,
            num_snapshots=receipt["snapshots"],
            snapshot_seconds=_first_snapshot(store),
        )

    def _uri(self, name: str) -> str:
        return str(self._folder / name / "run")

    def _machine(self, name: str, number: int) -> Path:
        return self._folder / name / f"machine-{number}"

    def _metrics_file(self, name: str) -> Path:
        return self._folder / name / "metrics.jsonl"

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def _first_snapshot(store: Store) -> float | None:
    """Seconds until the first snapshot that was taken while the program ran."""
    began = datetime.fromisoformat(read_events(store, "take-over")[0]["time"])
    for event in read_events(store, "committed"):
        if event["reason"] != "exit":
            return (datetime.fromisoformat(event["time"]) - began).total_seconds()
    return None


def _given(options: argparse.Namespace) -> list[str]:
    """The options of `run` among those of `check`, as they were given."""
    single = ("program", "program_file", "source", "dataset_uri", "working_folder", "interpreter")
    given = []
    for name in (*single, "notice_signal", "quiet_seconds"):
        if (value := getattr(options, name)) not in (None, ""):
            given.append(f"--{name.replace('_', '-')}={value}")
    for name in ("hyperparameter", "env", "channel", "metric"):
        given += [f"--{name}={value}" for value in getattr(options, name)]
    return given
