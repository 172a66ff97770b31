"""`check --program`: what interruptions change in a program that knows nothing of this project.

It runs twice to its end and then once more: killed before its first snapshot and later, and with a
notice inside a save. Each attempt is a new process with a new root, and has nothing but the run's
store.
"""

import argparse
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from contract.errors import Exit, UserError
from contract.keys import RECEIPT
from training.durable import Events, Head, History, QuietTime, Store, open_store
from training.proof.compare import Difference, ProgramRun, difference, losses_by_step
from training.proof.machine import live, recorded, run_command

# Short enough for a notice to come while a save is being written.
_NOTICE_POLL_SECONDS = 0.02
# A notice's time: enough for a save, not the two minutes that a program without a handler takes.
_NOTICE_SECONDS = 20


@dataclass(kw_only=True, slots=True)
class _Interruption:
    """What ended an attempt, and what that cost."""

    what: str
    attempt: int
    step: int  # that the program had reached
    is_late: bool  # the program had had time to save
    seconds_lost: float | None = None  # since the content of the snapshot it resumed from
    costs_all: bool = False  # although it is late, there was nothing to resume from
    why: str | None = None  # what had kept the folder from being snapshotted
    steps_redone: int | None = None  # None: its metrics name no step


class _Attempt:
    """What can be observed of a running attempt."""

    def __init__(self, number: int, metrics: Path, folder: Path) -> None:
        self.number = number
        self.began: float | None = None  # unix seconds: it had restored, and its program started
        self.step, self.has_snapshot = 0, False
        self._metrics = metrics
        self._quiet = QuietTime()
        self._folder = folder

    def look(self) -> float:
        """Read what it has written; return the seconds it has been running for."""
        num_begun = 0
        for record in recorded(self._metrics):
            if record["kind"] == "resume":
                # A resumed attempt must lose something too: only a commit of its own counts.
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
        return self._quiet.look_at(self._folder)

    def obstacle(self) -> str | None:
        """Return what keeps its folder from being snapshotted, as a clause."""
        self.is_saving()
        if (listing := self._quiet.listing) is None or listing.is_empty:
            return "it had saved nothing by then"
        if not self._quiet.is_closed() and (held := self._quiet.found_open) is not None:
            return f"{held} stays open for writing"
        seconds = time.time() - listing.written_ns / 1e9
        return f"{listing.newest!r} changed {seconds:.1f} s before"


class _ProgramRuns:
    """Starts `python -m training run` as often as a run needs it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._interruptions: list[_Interruption] = []
        self._folder = folder
        self._given = list(_given(options))
        self._num_attempts = 0

    def run(self, name: str) -> ProgramRun:
        """Run the program to its end."""
        began, self._num_attempts = time.monotonic(), 0
        self._finish(name)
        return self._read(name, time.monotonic() - began)

    def interrupted(self, name: str, whole: ProgramRun, num_kills: int) -> ProgramRun:
        """Run it with a kill before a snapshot and after each equal share, and a notice."""
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
            return  # it ended sooner
        assert attempt.began is not None
        store = open_store(self._uri(name))
        written = [event["written_at"] for event in Events.read(store, "committed")]
        head = Head.read(store)
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
        if code == Exit.INTERRUPTED:
            attempt.look()
            what, number = "a notice inside a save", attempt.number
            self._interruptions.append(
                _Interruption(what=what, attempt=number, step=attempt.step, is_late=False)
            )

    def _finish(self, name: str) -> None:
        code = self._live(name, self._next(name))
        if code != Exit.FINISHED:
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
        if code == Exit.USER:
            raise UserError(said)
        when = "after an interruption" if self._interruptions else "without any interruption"
        raise UserError(f"the program failed {when} (exit code {code}): {said}")

    def _read(self, name: str, seconds: float) -> ProgramRun:
        store = open_store(self._uri(name))
        found = store.get(RECEIPT)
        assert found is not None, "a finished run has a receipt"
        receipt = json.loads(found.data)
        return ProgramRun(
            losses=losses_by_step(History.read(store).lines),
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
    began = datetime.fromisoformat(Events.read(store, "take-over")[0]["time"])
    for event in Events.read(store, "committed"):
        if event["reason"] != "exit":
            return (datetime.fromisoformat(event["time"]) - began).total_seconds()
    return None


def _given(options: argparse.Namespace) -> list[str]:
    """Return the options of `run` among those of `check`, as they were given."""
    single = ("program", "program_file", "source", "dataset_uri", "working_folder", "interpreter")
    given = []
    for name in (*single, "notice_signal", "quiet_seconds"):
        if (value := getattr(options, name)) not in (None, ""):
            given.append(f"--{name.replace('_', '-')}={value}")
    for name in ("hyperparameter", "env", "channel", "metric"):
        given += [f"--{name}={value}" for value in getattr(options, name)]
    return given


def check_program(options: argparse.Namespace) -> int:
    """Run the program three times and compare; exit code 1: an interruption changes the result."""
    if options.name is not None:
        raise UserError(f"got both {options.name!r} and a program; check one at a time")
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        runs = _ProgramRuns(options, Path(folder))
        whole = runs.run("whole")
        _refuse_untestable(whole)
        _say(options, f"[ok] uninterrupted: {_described(whole)}")
        own = difference(runs.run("again"), whole)
        _say(options, f"{'[ok]' if own.is_none else '[note]'} once more: {_compared(own)}")
        interrupted = runs.interrupted("killed", whole, options.kills)
    late = [one for one in interrupted.interruptions if one["is_late"]]
    if not late:
        raise UserError(
            "the program ended each time before it could be killed after a snapshot, so nothing "
            "was tested; let it save sooner, train longer, or lower --quiet-seconds"
        )
    found = difference(interrupted, whole)
    if options.json:
        print(json.dumps(_record(whole, interrupted, own, found), indent=1))
    else:
        _show(interrupted, own, found)
    costs_all = any(one["costs_all"] for one in late)
    return Exit.FINISHED if found.is_none and not costs_all else Exit.FAILED


def _refuse_untestable(whole: ProgramRun) -> None:
    """Raise UserError if a comparison could show nothing."""
    if not whole.num_snapshots:
        raise UserError(
            "the program saved nothing to its checkpoint folder, so any interruption starts it "
            "from scratch; save to $SM_CHECKPOINT_DIR, and load from there at the start"
        )
    if not whole.files and not any(map(math.isfinite, whole.losses.values())):
        raise UserError(
            "the program shows nothing to compare; name its loss with --metric, as in "
            "--metric 'step=step ([0-9]+)' --metric 'loss=loss ([0-9.]+)', or write its model to "
            "$SM_MODEL_DIR"
        )


def _record(
    whole: ProgramRun, interrupted: ProgramRun, own: Difference, found: Difference
) -> dict[str, Any]:
    return {
        "is_equal": found.is_none,
        "costs_all": any(one["costs_all"] for one in interrupted.interruptions),
        "uninterrupted": asdict(whole),
        "interrupted": asdict(interrupted),
        "difference_of_two_uninterrupted": asdict(own),
        "difference": asdict(found),
    }


def _say(options: argparse.Namespace, line: str) -> None:
    if not options.json:
        print(line, flush=True)


def _described(run: ProgramRun) -> str:
    return (
        f"{len(run.losses)} losses, {run.num_snapshots} snapshots, {len(run.files)} final files, "
        f"{run.seconds:.0f} s"
    )


def _compared(found: Difference) -> str:
    if found.is_none:
        return "the same losses and final files"
    words = []
    if found.steps:
        words.append(
            f"{len(found.steps)} losses differ, from step {found.steps[0]} on, "
            f"by up to {found.largest:.4g}"
        )
    if found.files:
        words.append(f"other files: {', '.join(found.files)}")
    return "; ".join(words)


def _show(interrupted: ProgramRun, own: Difference, found: Difference) -> None:
    for one in interrupted.interruptions:
        redone = "steps redone: unknown, as its metrics name no step"
        if one["steps_redone"] is not None:
            redone = f"{one['steps_redone']} steps redone"
        lost = "?" if one["seconds_lost"] is None else f"{one['seconds_lost']:.1f}"
        print(f"  {one['what']}: {lost} s lost, {redone}")
    if found.missing:
        print(
            f"  losses known of only one run: {len(found.missing)}, from step {found.missing[0]} on"
        )
    if not found.is_none:
        print(f"[failed] interrupted, it ends differently: {_compared(found)}")
        if own.is_none:
            print("  Uninterrupted, it ends the same each time: its checkpoint lacks something,")
            print("  such as random states or the place in the epoch. docs/port.md shows a remedy.")
        else:
            print("  Two uninterrupted runs differ as well: seed it first, then check again.")
    late = [one for one in interrupted.interruptions if one["is_late"]]
    if in_vain := [one for one in late if one["costs_all"]]:
        print(
            f"[failed] {'bit for bit, but ' if found.is_none else ''}an interruption costs all: "
            f"{len(in_vain)} of {len(late)} kills found no snapshot to resume from "
            f"({in_vain[0]['why']})"
        )
        print("  Call commit() after each save, save to new files and rename them, or lower")
        print("  --quiet-seconds. docs/your-script.md says when a snapshot is taken.")
    elif found.is_none:
        print(
            f"[ok] {len(interrupted.interruptions)} interruptions change nothing: bit for bit; "
            f"a kill after the first snapshot costs up to "
            f"{max(one['seconds_lost'] for one in late):.1f} s"
        )
