"""`check --program`: what interruptions change in a program that knows nothing of this project.

It runs twice to its end and then once more: killed before its first snapshot and later, and with a
notice inside a save. Each attempt is a new process with a new root, and has nothing but the run's
store.

Plays a program through lives that end as machines do: killed, with a notice, or shut down.

Under our trainer, each life is a new machine that has nothing but the run's store; alone, a life
starts again on the same disk, as one that outlives the machine.

The effects of interruptions on a program, read from its JSON lines.

They have `restored` (None if `torn`; steps if `mismatched`), `step` with its sample `ids`, `saving`
or `saved` with a step, or `final` with a checksum, and a time `at`. Other lines are ignored.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias, get_args

from contract.errors import Exit, UserError
from contract.keys import RECEIPT
from training.durable import Events, Head, History, QuietTime, Store, open_store
from training.proof.experiment import Difference, ProgramRun, difference, losses_by_step

Report = Mapping[str, Any]


def recorded(path: Path, name: str) -> list[dict[str, Any]]:
    """Return the JSON objects with this name among a file's lines; half a line does not count."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        if line.startswith("{"):
            with suppress(ValueError):
                record = json.loads(line)
                if name in record:
                    found.append(record)
    return found


@dataclass(kw_only=True, slots=True)
class Account:
    """A run through its lives: its kills, and what was restored, lost, and consumed.

    Its clock counts the seconds of the work that stands: a restore sets it back.
    """

    kills: int = 0
    never_back: list[str] = field(default_factory=list)  # why, if it does not end
    torn: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)  # seconds of repeated work, by kill
    lost_saves: list[float] = field(default_factory=list)  # the part that a finished save had held
    final: str | None = None
    ids: dict[int, Sequence[Any]] = field(default_factory=dict)  # by step, as they finally counted
    _clock: float = 0.0
    _done: dict[int, float] = field(default_factory=dict)
    _saved: dict[int, float] = field(default_factory=dict)
    _is_killed: bool = False

    def live(self, reports: Sequence[Report], name: str) -> None:
        """Add one life, killed or not; `name` identifies it in reports of damage."""
        began = reports[0]["at"] if reports else 0.0
        for one in reports:
            at = self._clock + one["at"] - began
            if "restored" in one:
                self._restore(one, name)
            elif "step" in one:
                if self._is_killed:
                    self._go_on(one["step"] - 1)  # the script does not report what it restored
                self._done[one["step"]] = at
                self.ids[one["step"]] = one.get("ids", ())
            elif "saved" in one:
                self._saved[one["saved"]] = at
            elif "final" in one:
                self.final = one["final"]
        if reports:
            self._clock += reports[-1]["at"] - began
        self._is_killed = True

    def samples(self, reference: "Account") -> tuple[int, int]:
        """Return how many samples were trained on more often and less often than uninterrupted."""
        ours, theirs = (
            Counter(map(str, chain.from_iterable(run.ids.values()))) for run in (self, reference)
        )
        return (ours - theirs).total(), (theirs - ours).total()

    def _restore(self, one: Report, name: str) -> None:
        if one["restored"] is None:
            self.torn.append(f"{name}: {one['torn']}")
            return
        if one.get("mismatched"):
            self.mismatched.append(f"{name}: steps {one['mismatched']}")
        if self._is_killed:
            self._go_on(one["restored"])

    def _go_on(self, step: int) -> None:
        """Continue from this step, which an earlier life had done; later work is void."""
        last = max((at for done, at in self._done.items() if done <= step), default=0.0)
        kept = max((at for done, at in self._saved.items() if done <= step), default=0.0)
        self.lost.append(max(0.0, self._clock - last))
        voided = [at for done, at in self._saved.items() if done > step]
        self.lost_saves.append(max(voided, default=0.0) - max(last, kept) if voided else 0.0)
        self._clock = last
        for known in (self._done, self._saved, self.ids):
            for done in [done for done in known if done > step]:
                del known[done]
        self._is_killed = False


ExitKind: TypeAlias = Literal["kill", "notice", "shutdown"]
MOST_FAILED_STARTS = 4
# The time until a shutdown kills: our service ends by itself; `docker stop` allows 10 s.
_SHUTDOWN_SECONDS, _ALONE_SECONDS = 60.0, 10.0
_LIMIT_SECONDS = 300.0  # after which a life that does not end or begin is killed
_SAVE_SECONDS = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How and when the machine ends before its program does."""

    exit: ExitKind
    is_due: Callable[[], bool]
    seconds: float = 0.0  # from the signal until all processes are killed
    poll_seconds: float = 0.02  # between two looks at whether it is due


@dataclass(kw_only=True, slots=True)
class Lives:
    """The lives of one run, with their files in a folder; each has its own log."""

    EXITS: ClassVar[Sequence[ExitKind]] = get_args(ExitKind)
    NOTICE_SECONDS: ClassVar = 10.0
    folder: Path
    options: Sequence[str] = ()  # of `run`: the program, and how it is run
    run_uri: str = ""  # default: in the folder
    trainer: str = "training"  # the module to run
    alone: Sequence[str] = ()  # the program's own command: it runs without our trainer
    environment: dict[str, str] = field(default_factory=lambda: {**os.environ})
    number: int = 0  # of the current life

    def __post_init__(self) -> None:
        self.run_uri = self.run_uri or str(self.folder / "run")

    @property
    def log(self) -> Path:
        """The output of the current life."""
        return self.folder / f"log-{self.number}"

    @property
    def checkpoints(self) -> Path:
        """The folder to which the program saves."""
        return self.folder / ("disk" if self.alone else "machine/ml") / "checkpoints"

    def reports(self) -> Sequence[Report]:
        """Return what the program reports in the current life."""
        return recorded(self.log, "at")

    def metrics(self) -> list[dict[str, Any]]:
        """Return what all lives have written to the metrics file."""
        return recorded(self.folder / "metrics.jsonl", "kind")

    def live(self, *options: str, end: End | None = None, limit: float = float("inf")) -> int:
        """Live once, at most `limit` seconds, with more `options` of `run`.

        Return the exit code, or minus the signal's number.
        """
        self.number += 1
        machine = self.folder / "machine"
        machine.mkdir(parents=True)
        with self.log.open("wb") as output:
            process = subprocess.Popen(
                self.alone or self._command(machine, options),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, **self._disk(), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        ends, is_told = time.monotonic() + limit, end is None
        try:
            while process.poll() is None:
                if end and not is_told and end.is_due():
                    ends, is_told = min(ends, time.monotonic() + end.seconds), True
                    if end.exit != "kill":
                        is_noticed = end.exit == "notice" and not self.alone
                        process.send_signal(signal.SIGUSR1 if is_noticed else signal.SIGTERM)
                if time.monotonic() >= ends:
                    break
                time.sleep(end.poll_seconds if end else _POLL_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        # Its last process may still be writing; the next machine has the same path, as all have.
        shutil.rmtree(machine.rename(self.folder / f"gone-{self.number}"), ignore_errors=True)
        return code

    def uninterrupted(self) -> Account:
        """Run a program that reports to its end; RuntimeError if it does not come there."""
        code, account = self.live(limit=_LIMIT_SECONDS), Account()
        account.live(self.reports(), "uninterrupted")
        if account.final is None:
            raise RuntimeError(f"it ends with exit code {code} uninterrupted; see {self.log}")
        return account

    def killed(
        self, how: ExitKind, answers: Sequence[str], rng: random.Random, span: float = 4.0
    ) -> Account:
        """Run a program that reports to its end; kills hit it while it trains, one for each answer.

        An answer is the program's to SIGTERM, which it reads from ANSWER. A kill comes within
        `span` seconds after a life's first step, or twice as much if it was to hit a save.
        """
        run, failed_starts = Account(), 0
        shutdown_seconds = _ALONE_SECONDS if self.alone else _SHUTDOWN_SECONDS
        seconds = {"kill": 0.0, "notice": self.NOTICE_SECONDS, "shutdown": shutdown_seconds}[how]
        while run.final is None:
            is_hit = run.kills < len(answers)
            answer = self.environment["ANSWER"] = answers[run.kills % len(answers)]
            end = End(exit=how, is_due=_Moment(self, rng, span).is_due, seconds=seconds)
            code = self.live(end=end if is_hit else None, limit=_LIMIT_SECONDS)
            reports, name = self.reports(), f"{self.log} ({answer})"
            run.live(reports, name)
            is_trained = any("step" in one for one in reports)
            run.kills += is_hit and is_trained and run.final is None
            # After anything else, such as an unreadable store, another machine continues.
            is_failed = code in (Exit.FAILED, Exit.USER, -signal.SIGKILL)
            if is_failed and not is_trained and not any("torn" in one for one in reports):
                run.torn.append(f"{name}: exit code {code}")
            failed_starts = 0 if is_trained else failed_starts + is_failed
            is_stuck = not is_hit and code == -signal.SIGKILL
            if run.final is None and (is_stuck or failed_starts == MOST_FAILED_STARTS):
                run.never_back.append(f"{self.log}: exit code {code}")
                break
        return run

    def _command(self, machine: Path, options: Sequence[str]) -> list[str]:
        return [
            *(sys.executable, "-m", self.trainer, "run", *self.options, *options),
            *(f"--run-uri={self.run_uri}", f"--writer=machine-{self.number}"),
            *(f"--metrics-file={self.folder / 'metrics.jsonl'}", "--lease-ttl-seconds=1"),
            *(f"--ml-root={machine / 'ml'}", f"--scratch={machine}"),
        ]

    def _disk(self) -> dict[str, str]:
        """Return the container contract's variables for a program that runs alone."""
        if not self.alone:
            return {}
        model = self.checkpoints.with_name("model")
        for folder in (self.checkpoints, model):
            folder.mkdir(parents=True, exist_ok=True)
        return {"SM_CHECKPOINT_DIR": str(self.checkpoints), "SM_MODEL_DIR": str(model)}


class _Moment:
    """A moment after a life's first step."""

    def __init__(self, lives: Lives, rng: random.Random, span: float) -> None:
        self._lives, self._quiet = lives, QuietTime()
        # Three of four are inside a save, where a program's weakness shows.
        self._is_in_save = rng.random() < 0.75
        self._after = rng.uniform(0.0, _SAVE_SECONDS if self._is_in_save else span)
        # A program that saves late or never is hit all the same.
        self._latest = rng.uniform(span, 2 * span)
        self._due = float("inf")
        self._is_met = self._has_stepped = False

    def is_due(self) -> bool:
        """Whether it has come; called again and again."""
        now, text = time.monotonic(), self._lives.log.read_text(errors="replace")
        if not self._has_stepped and '"step"' in text:
            self._has_stepped, self._due = True, now + self._latest
        if self._has_stepped and not self._is_met and (not self._is_in_save or self._saves(text)):
            self._is_met, self._due = True, min(self._due, now + self._after)
        return now >= self._due

    def _saves(self, text: str) -> bool:
        """Whether it saves: it says so, or, unless it reports, its folder changes."""
        if '"restored"' in text:
            return '"saving"' in text
        return self._quiet.look_at(self._lives.checkpoints)


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
