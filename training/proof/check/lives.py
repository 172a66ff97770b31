"""Plays a program through lives that end as machines do: killed, with a notice, or shut down.

Under our trainer, each life is a new machine that has nothing but the run's store; alone, a life
starts again on the same disk, as one that outlives the machine.

The effects of interruptions on a program, read from its JSON lines.

They have `restored` (None if `torn`; steps if `mismatched`), `step` with its sample `ids`, `saving`
or `saved` with a step, or `final` with a checksum, and a time `at`. Other lines are ignored.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from contract.errors import Exit
from training.durable import QuietTime

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
    redone: list[int] = field(default_factory=list)  # steps done again, by kill
    lost_saves: list[float] = field(default_factory=list)  # the part that a finished save had held
    final: str | None = None
    lives: list[int] = field(default_factory=list)  # how many had been lived, by kill
    ids: dict[int, Sequence[Any]] = field(default_factory=dict)  # by step, as they finally counted
    _num_lives: int = 0
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
        self._is_killed, self._num_lives = True, self._num_lives + 1

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
        self.lives.append(self._num_lives)
        self.redone.append(sum(done > step for done in self._done))
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
_SAVE_SECONDS = 0.4
_MOST_LIVES = 50  # more than so many uninterrupted ones never end
_POLL_SECONDS = 0.02  # between two looks at whether an end is due


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How and when the machine ends before its program does."""

    exit: ExitKind
    is_due: Callable[[], bool]
    seconds: float = 0.0  # from the signal until all processes are killed


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
    machine: Path = Path()  # all lives' disk; default: in the folder
    number: int = 0  # of the current life
    first: str = '"step"'  # in its log, once it has begun to train
    # What a life reports, from its log; by default, the program's own JSON lines.
    reporter: Callable[[Path], Sequence[Report]] | None = None
    limit_seconds: float = 300.0  # after which a life that does not end or begin is killed
    wait_seconds: float = 0.0  # the most from a life's first step until a kill is looked for
    say: Callable[[str], None] = lambda line: None
    ended: list[float] = field(default_factory=list)  # unix seconds of each life's end

    def __post_init__(self) -> None:
        self.run_uri = self.run_uri or str(self.folder / "run")
        self.machine = self.folder / "machine" if self.machine == Path() else self.machine

    @property
    def log(self) -> Path:
        """The output of the current life."""
        return self.folder / f"log-{self.number}"

    @property
    def checkpoints(self) -> Path:
        """The folder to which the program saves."""
        return (self.folder / "disk" if self.alone else self.machine / "ml") / "checkpoints"

    def reports(self) -> Sequence[Report]:
        """Return what the program reports in the current life."""
        return self.reporter(self.log) if self.reporter else recorded(self.log, "at")

    def live(self, *options: str, end: End | None = None, limit: float = float("inf")) -> int:
        """Live once, at most `limit` seconds, with more `options` of `run`.

        Return the exit code, or minus the signal's number.
        """
        self.number += 1
        machine = self.machine
        shutil.rmtree(
            machine, ignore_errors=True
        )  # a process that died last may have made it again
        machine.mkdir(parents=True)
        self.folder.mkdir(exist_ok=True)
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
                time.sleep(_POLL_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        self.ended.append(time.time())
        # Its last process may still be writing; the next machine has the same path, as all have.
        shutil.rmtree(machine.rename(self.folder / f"gone-{self.number}"), ignore_errors=True)
        return code

    def uninterrupted(self) -> Account:
        """Run a program that reports to its end; RuntimeError if it does not come there."""
        code, account = self.live(limit=self.limit_seconds), Account()
        account.live(self.reports(), "uninterrupted")
        if account.final is None:
            raise RuntimeError(f"it ends with exit code {code} uninterrupted; see {self.log}")
        return account

    def killed(
        self, *hows: ExitKind, answers: Sequence[str], rng: random.Random, span: float = 4.0
    ) -> Account:
        """Run a program that reports to its end; kills hit it while it trains, one for each answer.

        They are of these kinds in turn. An answer is the program's to SIGTERM, which it reads from
        ANSWER. A kill comes within `span` seconds after a life's first step, or twice as much if it
        was to hit a save.
        """
        run, failed_starts = Account(), 0
        shutdown_seconds = _ALONE_SECONDS if self.alone else _SHUTDOWN_SECONDS
        seconds = {"kill": 0.0, "notice": self.NOTICE_SECONDS, "shutdown": shutdown_seconds}
        while run.final is None:
            is_hit = run.kills < len(answers)
            answer = self.environment["ANSWER"] = answers[run.kills % len(answers)]
            how = hows[run.kills % len(hows)]
            end = End(exit=how, is_due=_Moment(self, rng, span).is_due, seconds=seconds[how])
            code = self.live(end=end if is_hit else None, limit=self.limit_seconds)
            reports, name = self.reports(), f"{self.log} ({answer})"
            run.live(reports, name)
            is_trained = any("step" in one for one in reports) or (
                code not in (Exit.FAILED, Exit.USER)
                and self.first in self.log.read_text(errors="replace")
            )
            run.kills += is_hit and is_trained and run.final is None
            self.say(f"  {how if is_hit else 'end'} of machine {self.number}: exit code {code}")
            # After anything else, such as an unreadable store, another machine continues.
            is_failed = code in (Exit.FAILED, Exit.USER, -signal.SIGKILL)
            if is_failed and not is_trained and not any("torn" in one for one in reports):
                run.torn.append(f"{name}: exit code {code}")
            failed_starts = 0 if is_trained else failed_starts + is_failed
            is_stuck = not is_hit and code == -signal.SIGKILL
            is_stuck |= self.number > len(answers) + _MOST_LIVES
            if run.final is None and (is_stuck or failed_starts == MOST_FAILED_STARTS):
                run.never_back.append(f"{self.log}: exit code {code}")
                break
        return run

    def _command(self, machine: Path, options: Sequence[str]) -> list[str]:
        return [
            *(sys.executable, "-m", self.trainer, "run", *self.options, *options),
            *(f"--run-uri={self.run_uri}", f"--writer=machine-{self.number}"),
            *(f"--metrics-file={self.log.with_name('metrics.jsonl')}", "--lease-ttl-seconds=1"),
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
        self._wait = rng.uniform(0.0, lives.wait_seconds) if lives.wait_seconds else 0.0
        self._due = self._from = float("inf")
        self._is_met = self._has_stepped = False

    def is_due(self) -> bool:
        """Whether it has come; called again and again."""
        now, text = time.monotonic(), ""
        if not self._has_stepped or (self._is_in_save and self._lives.reporter is None):
            text = self._lives.log.read_text(errors="replace")
        if not self._has_stepped and self._lives.first in text:
            self._has_stepped, self._from = True, now + self._wait
            self._due = self._from + self._latest
        is_waiting = not self._is_met and now >= self._from
        if is_waiting and (not self._is_in_save or self._saves(text)):
            self._is_met, self._due = True, min(self._due, now + self._after)
        return now >= self._due

    def _saves(self, text: str) -> bool:
        """Whether it saves: it says so, or, unless it reports, its folder changes."""
        if '"restored"' in text:
            return '"saving"' in text
        return self._quiet.look_at(self._lives.checkpoints)
