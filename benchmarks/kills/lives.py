"""The lives of a script: alone with its local disk, or under our trainer with only a store.

Alone, a killed script starts again in the same folder, as with a disk that outlives the machine;
under our trainer, each life has a new root, and the store has faults.
"""

import os
import random
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TextIO, TypeAlias, get_args

from benchmarks import REPOSITORY
from benchmarks.kills.judge import Account, Said, said_in
from benchmarks.kills.s3_server import BUCKET, open_server
from contract.errors import Exit as ExitCode
from training.proof.injector import StatusFile
from training.proof.machine import live, run_command

Exit: TypeAlias = Literal["kill", "notice", "shutdown"]
Way: TypeAlias = Literal["alone", "folder", "s3"]
EXITS: Sequence[Exit] = get_args(Exit)
WAYS: Sequence[Way] = get_args(Way)
ANSWERS = ("ignored", "exit 0", "exit 143", "works 200 s")
# The time until a shutdown kills: `docker stop` allows 10 s; our service ends by itself.
_SHUTDOWN_SECONDS = {"alone": 10.0, "folder": 60.0, "s3": 60.0}
_LIMIT_SECONDS = 300.0  # after which a life that does not end or begin is killed
MOST_FAILED_STARTS = 4
_POLL_SECONDS = 0.02
_SAVE_SECONDS = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A script: how it is started and killed, and in which environment."""

    name: str
    files: Sequence[Path]  # copied into their own folder
    arguments: Sequence[str]
    requirements: Sequence[str] = ()  # for its own environment; empty: use this one
    answers: Sequence[str] = ("its own",)
    notice_seconds: float = 10.0
    quiet_seconds: float = 0.5
    span_seconds: float = 4.0  # a kill comes within this time after a life's first step
    bound_seconds: float = 10.0  # the most lost work that a finished save had held
    users_must: str = ""  # what users must do for an exact resume


@dataclass(kw_only=True, slots=True)
class Killed:
    """A run that was killed again and again."""

    run: Account = field(default_factory=Account)
    kills: int = 0
    never_back: list[str] = field(default_factory=list)  # why, if it does not end
    faults: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Plays a row's cells in a folder."""

    row: Row
    python: Path
    folder: Path
    rng: random.Random

    def uninterrupted(self, number: int) -> Account:
        """Run it alone to its end."""
        with self._place("alone", f"whole-{number}") as place:
            account = Account()
            said, code = place.live(0, None, "ignored", self.rng)
            account.live(said, "uninterrupted")
        if account.final is None:
            raise RuntimeError(f"it ends with exit code {code} uninterrupted; see {place.log(0)}")
        return account

    def killed(self, way: Way, how: Exit, number: int, kills: range) -> Killed:
        """Run it to its end; these kills, or some of them, hit it while it trains."""
        killed = Killed()
        with self._place(way, f"{how}-{number}") as place:
            self._play(killed, place, how, kills)
            killed.faults = place.num_faults()
        return killed

    def _play(self, killed: Killed, place: "_Place", how: Exit, kills: range) -> None:
        account, failed_starts, number = killed.run, 0, 0
        while account.final is None:
            is_hit = killed.kills < len(kills)
            answer = self.row.answers[(kills.start + killed.kills) % len(self.row.answers)]
            said, code = place.live(number, how if is_hit else None, answer, self.rng)
            name = f"{place.log(number)} ({answer})"
            account.live(said, name)
            is_trained = any("step" in one for one in said)
            killed.kills += is_hit and is_trained and account.final is None
            # After anything else, such as an unreadable store, another machine continues.
            is_failed = code in (ExitCode.FAILED, ExitCode.USER) or code == -signal.SIGKILL
            if is_failed and not is_trained and not any("torn" in one for one in said):
                account.torn.append(f"{name}: exit code {code}")
            failed_starts = 0 if is_trained else failed_starts + is_failed
            if account.final is None and (
                failed_starts == MOST_FAILED_STARTS or (not is_hit and code == -signal.SIGKILL)
            ):
                killed.never_back.append(f"{place.log(number)}: exit code {code}")
                return
            number += 1

    @contextmanager
    def _place(self, way: Way, name: str) -> Iterator["_Place"]:
        folder = self.folder / way / name
        shutil.rmtree(folder, ignore_errors=True)
        source = folder / "source"
        source.mkdir(parents=True)
        for path in self.row.files:
            shutil.copy(path, source)
        with ExitStack() as stack:
            store = stack.enter_context(open_server()) if way == "s3" else {}
            environment = {
                **{k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"},
                **store,
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                "FAULTS": str(folder / "faults"),
            }
            yield _Place(self.row, self.python, way, folder, environment)
        for path in folder.iterdir():  # keeps the logs
            if path.is_dir():
                shutil.rmtree(path)


@dataclass(frozen=True, slots=True)
class _Place:
    """The folders and the environment of one run."""

    row: Row
    python: Path
    way: Way
    folder: Path
    environment: Mapping[str, str]

    def log(self, number: int) -> Path:
        return self.folder / f"log-{number}"

    def live(
        self, number: int, how: Exit | None, answer: str, rng: random.Random
    ) -> tuple[list[Said], int]:
        """Live once; return the script's records and its exit code."""
        log = self.log(number)
        log.write_bytes(b"")
        with log.open(errors="replace") as output:
            death = _Death(self, output, how, rng)
            code = live(
                self._command(number),
                log,
                is_lost=death.is_lost,
                began=death.begin,
                poll_seconds=_POLL_SECONDS,
                environment={**self.environment, **self._contract(), "ANSWER": answer},
            )
        while (self.folder / "machine").exists():  # its last process may still be writing
            shutil.rmtree(self.folder / "machine", ignore_errors=True)
        return said_in(log.read_text(errors="replace")), code

    @property
    def checkpoints(self) -> Path:
        """The checkpoint folder of the current life."""
        if self.way == "alone":
            return self.folder / "local" / "checkpoints"
        return self.folder / "machine" / "ml" / "checkpoints"

    def num_faults(self) -> int:
        """Return the number of the store's faults so far."""
        if self.way == "folder":
            return StatusFile(self.folder / "faults").num_faults
        if self.way == "s3":
            with urllib.request.urlopen(
                f"{self.environment['AWS_ENDPOINT_URL']}/-/faults"
            ) as answer:
                return int(answer.read())
        return 0

    def _contract(self) -> dict[str, str]:
        """Return the container contract's variables for a script that runs alone."""
        if self.way != "alone":
            return {}
        for name in ("checkpoints", "model"):
            (self.folder / "local" / name).mkdir(parents=True, exist_ok=True)
        local = self.folder / "local"
        return {"SM_CHECKPOINT_DIR": f"{local}/checkpoints", "SM_MODEL_DIR": f"{local}/model"}

    def _command(self, number: int) -> list[str]:
        words = [self.row.files[0].name, *self.row.arguments]
        if self.way == "alone":
            return [str(self.python), str(self.folder / "source" / words[0]), *words[1:]]
        # A new machine at the same path, as /opt/ml is the same on all machines.
        machine = self.folder / "machine"
        machine.mkdir()
        uri = f"s3://{BUCKET}/runs/one" if self.way == "s3" else str(self.folder / "run")
        command = run_command(
            machine,
            uri,
            [
                f"--program={' '.join(['python', *words])}",
                f"--source={self.folder / 'source'}",
                f"--interpreter={self.python}",
                f"--quiet-seconds={self.row.quiet_seconds:g}",
                f"--notice-budget-seconds={self.row.notice_seconds:g}",
                f"--writer=machine-{number}",
            ],
        )
        if self.way == "folder":
            command[command.index("training")] = "benchmarks.kills.faulty_folder"
        return command


class _Death:
    """The end of a life: its exit, and its moment after the first step, mostly inside a save."""

    def __init__(self, place: _Place, log: TextIO, how: Exit | None, rng: random.Random) -> None:
        self._place, self._how = place, how
        self._log = log
        self._began = time.monotonic()
        # Three of four are inside a save, where a habit's weakness shows.
        is_in_save = rng.random() < 0.75
        span = place.row.span_seconds
        self._word = '"saving"' if is_in_save else '"step"'
        self._after = rng.uniform(0.0, _SAVE_SECONDS if is_in_save else span)
        # A script that saves late or never is killed all the same.
        self._latest = rng.uniform(span, 2 * span)
        self._listed: object = None
        self._due = float("inf")
        self._ends = float("inf")
        self._steps_since = float("inf")
        self._pid = 0

    def begin(self, pid: int) -> None:
        """Take note of the process's id."""
        self._pid = pid

    def is_lost(self) -> bool:
        """Return whether the machine is lost now; send the exit's signal when it is due."""
        now, text = time.monotonic(), self._log.read()
        if self._how is None:
            return now > self._began + _LIMIT_SECONDS
        if '"step"' in text:
            self._steps_since = min(self._steps_since, now)
        is_saving = self._word == '"saving"' and self._place.row.requirements and self._has_saved()
        if self._word in text or is_saving:
            self._due = min(self._due, now + self._after)
        due = min(self._due, self._steps_since + self._latest)
        if self._ends == float("inf") and now >= due:
            self._ends = now + self._tell()
        return now >= min(self._ends, self._began + _LIMIT_SECONDS)

    def _has_saved(self) -> bool:
        """Whether the checkpoint folder has changed since the first step: the trainer saves."""
        if self._steps_since == float("inf"):
            return False
        found = set()
        # In Python 3.11, Path.rglob fails if a folder is deleted during the walk.
        for folder, _, names in os.walk(self._place.checkpoints):
            for name in names:
                path = Path(folder, name)
                with suppress(OSError):
                    found.add((path, path.stat().st_size))
        before, self._listed = self._listed, found
        return before not in (None, found)

    def _tell(self) -> float:
        """Send this exit's signal; return the seconds until the machine is gone."""
        if self._how == "kill":
            return 0.0
        is_notice = self._how == "notice"
        sent = signal.SIGUSR1 if is_notice and self._place.way != "alone" else signal.SIGTERM
        os.kill(self._pid, sent)
        if is_notice:
            return self._place.row.notice_seconds
        return _SHUTDOWN_SECONDS[self._place.way]
