"""`check --program`: what interruptions change in a program that knows nothing of this project.

It runs twice to its end and then once more: killed before its first snapshot and later, and with a
notice inside a save. Each attempt is a new process with a new root, and has nothing but the run's
store.
"""

import argparse
import json
import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NoReturn

from contract.errors import Exit, UserError
from contract.keys import RECEIPT
from training.durable import Events, Head, History, QuietTime, Store, open_store
from training.proof.check.player import End, Lives
from training.proof.compare import Difference, ProgramRun, difference, losses_by_step

# Each look reads all of the run's metrics.
_POLL_SECONDS = 0.1
# A notice's time: enough for a save, not the two minutes that a program without a handler takes.
_NOTICE_SECONDS = 20
_OF_RUN = (
    *("program", "program_file", "source", "dataset_uri", "working_folder", "interpreter"),
    *("notice_signal", "quiet_seconds", "hyperparameter", "env", "channel", "metric"),
)


@dataclass(kw_only=True, slots=True)
class _Interruption:
    """The end of an attempt, and its cost."""

    what: str
    attempt: int
    step: int  # that the program had reached
    is_late: bool  # the program had had time to save
    seconds_lost: float | None = None  # since the content of the snapshot it resumed from
    costs_all: bool = False  # although it is late, there was nothing to resume from
    why: str | None = None  # what had kept the folder from being snapshotted
    steps_redone: int | None = None  # None: its metrics name no step


class _Watch:
    """Observations of the current life."""

    def __init__(self, lives: Lives) -> None:
        self.number = lives.number + 1
        self.began: float | None = None  # unix seconds: it had restored, and its program started
        self.step, self.has_snapshot = 0, False
        self._quiet = QuietTime()
        self._lives = lives

    def look(self) -> float:
        """Read what it has written; return the seconds it has been running for."""
        num_begun = 0
        for record in self._lives.metrics():
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
        """Whether its program has started, and writes to its folder."""
        has_begun = self.began is not None or self.look() > 0
        return has_begun and self._quiet.look_at(self._lives.checkpoints)

    def obstacle(self) -> str | None:
        """Return what keeps its folder from being snapshotted, as a clause."""
        self._quiet.look_at(self._lives.checkpoints)
        if (listing := self._quiet.listing) is None or listing.is_empty:
            return "it had saved nothing by then"
        if not self._quiet.is_closed() and (held := self._quiet.found_open) is not None:
            return f"{held} stays open for writing"
        seconds = time.time() - listing.written_ns / 1e9
        return f"{listing.newest!r} changed {seconds:.1f} s before"


class _ProgramRun:
    """A run of the program in a folder, under the options of `run` that were given."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._lives = Lives(folder=folder, options=[*_given(options)])
        self._store = open_store(self._lives.run_uri)
        self._interruptions: list[_Interruption] = []
        self._began = time.monotonic()

    def finish(self) -> ProgramRun:
        """Run it to its end."""
        code = self._lives.live()
        if code != Exit.FINISHED:
            self._fail(code)
        found = self._store.get(RECEIPT)
        assert found is not None, "a finished run has a receipt"
        receipt = json.loads(found.data)
        return ProgramRun(
            losses=losses_by_step(History.read(self._store).lines),
            files=receipt["final_files"],
            interruptions=receipt["interruptions"],
            seconds=time.monotonic() - self._began,
            num_snapshots=receipt["snapshots"],
            snapshot_seconds=_first_snapshot(self._store),
        )

    def interrupted(self, whole: ProgramRun, num_kills: int) -> ProgramRun:
        """Run it with a kill before a snapshot and after each equal share, and a notice."""
        first, last = whole.snapshot_seconds, max(whole.losses, default=0)
        share = whole.seconds / (num_kills + 1)
        early = (share if first is None else first) / 2

        def is_done(watch: _Watch, number: int) -> bool:
            seconds, step = watch.look(), last * number / (num_kills + 1)
            is_there = watch.step >= step if step else seconds >= share
            return bool(seconds) and is_there and (watch.has_snapshot or first is None)

        self._kill("before its first snapshot", False, lambda watch: watch.look() >= early)
        for number in range(1, num_kills + 1):
            self._kill("later", True, partial(is_done, number=number))
        self._notice()
        run = self.finish()
        begun = [int(line["step"]) for line in self._lives.metrics() if line["kind"] == "resume"]
        for one in self._interruptions:
            if (last or one.step) and one.attempt < len(begun):
                one.steps_redone = max(0, one.step - begun[one.attempt])
            if one.seconds_lost is None:
                one.seconds_lost = run.interruptions[one.attempt - 1]["seconds_lost"]
        return replace(run, interruptions=[asdict(one) for one in self._interruptions])

    def _kill(self, when: str, is_late: bool, is_due: Callable[[_Watch], bool]) -> None:
        watch, obstacle = _Watch(self._lives), list[str | None]()

        def is_hit() -> bool:
            if is_due(watch):
                obstacle.append(watch.obstacle())
            return bool(obstacle)

        end = End(exit="kill", is_due=is_hit, poll_seconds=_POLL_SECONDS)
        if self._lives.live(end=end) != -signal.SIGKILL or not obstacle:
            return  # it ended sooner
        assert watch.began is not None
        written = [event["written_at"] for event in Events.read(self._store, "committed")]
        head = Head.read(self._store)
        costs_all = is_late and (head is None or not head.checkpoints)
        self._interruptions.append(
            _Interruption(
                what=f"killed {when}",
                attempt=watch.number,
                step=watch.step,
                is_late=is_late,
                seconds_lost=time.time() - max([watch.began, *written]),
                costs_all=costs_all,
                why=obstacle[0] if costs_all else None,
            )
        )

    def _notice(self) -> None:
        watch = _Watch(self._lives)
        end = End(exit="notice", is_due=watch.is_saving, seconds=math.inf)
        budget = f"--notice-budget-seconds={_NOTICE_SECONDS}"
        if self._lives.live(budget, end=end) == Exit.INTERRUPTED:
            watch.look()
            what = "a notice inside a save"
            self._interruptions.append(
                _Interruption(what=what, attempt=watch.number, step=watch.step, is_late=False)
            )

    def _fail(self, code: int) -> NoReturn:
        lines = self._lives.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        message = (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")
        if code == Exit.USER:
            raise UserError(message)
        when = "after an interruption" if self._interruptions else "without any interruption"
        raise UserError(f"the program failed {when} (exit code {code}): {message}")


def _first_snapshot(store: Store) -> float | None:
    """Seconds until the first snapshot that was taken while the program ran."""
    began = datetime.fromisoformat(Events.read(store, "take-over")[0]["time"])
    for event in Events.read(store, "committed"):
        if event["reason"] != "exit":
            return (datetime.fromisoformat(event["time"]) - began).total_seconds()
    return None


def _given(options: argparse.Namespace) -> Iterator[str]:
    """Yield the options of `run` among those of `check`, as they were given."""
    for name in _OF_RUN:
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value not in (None, ""):
                yield f"--{name.replace('_', '-')}={value}"


def check_program(options: argparse.Namespace) -> int:
    """Run the program three times and compare; exit code 1: an interruption changes the result."""
    if options.name is not None:
        raise UserError(f"got both {options.name!r} and a program; check one at a time")

    def say(line: str) -> None:
        if not options.json:
            print(line, flush=True)

    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        whole = _ProgramRun(options, Path(folder, "whole")).finish()
        _refuse_untestable(whole)
        say(
            f"[ok] uninterrupted: {len(whole.losses)} losses, {whole.num_snapshots} snapshots, "
            f"{len(whole.files)} final files, {whole.seconds:.0f} s"
        )
        own = difference(_ProgramRun(options, Path(folder, "again")).finish(), whole)
        say(f"{'[ok]' if own.is_none else '[note]'} once more: {_compared(own)}")
        interrupted = _ProgramRun(options, Path(folder, "killed")).interrupted(whole, options.kills)
    late = [one for one in interrupted.interruptions if one["is_late"]]
    if not late:
        raise UserError(
            "the program ended each time before it could be killed after a snapshot, so nothing "
            "was tested; let it save sooner, train longer, or lower --quiet-seconds"
        )
    found = difference(interrupted, whole)
    costs_all = any(one["costs_all"] for one in late)
    if options.json:
        record = {
            "is_equal": found.is_none,
            "costs_all": costs_all,
            "uninterrupted": asdict(whole),
            "interrupted": asdict(interrupted),
            "difference_of_two_uninterrupted": asdict(own),
            "difference": asdict(found),
        }
        print(json.dumps(record, indent=1))
    else:
        _show(interrupted, own, found)
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
