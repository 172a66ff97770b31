"""A user's script in virtual time: it trains, saves by its habit, hears a signal, begins again.

It knows nothing of the project but the folders of the container contract, and its commit file.
"""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.simulation.bucket import FOLDER_BYTES
from tests.simulation.clock import CLOCK, Event, sleep
from tests.simulation.disk import Disk, TimedPath
from tests.simulation.habits import Habit

if TYPE_CHECKING:
    from tests.simulation.programs import SimulatedProcess

_DATABASE = "runs.db"
_SETTINGS = "config.json"
_HEAD = re.compile(rb"T:(\d+):(\d+):")
_LINE = b"%07d\n"
_PIECE = 30.0


class TornError(Exception):
    """A save cannot be read: the path that its reader names."""


class _Exit(Exception):
    """The script ends, with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def tensors(step: int, pieces: int = 1) -> bytes:
    """Return what a save writes into one of its files."""
    size = FOLDER_BYTES // pieces
    head = b"T:%d:%d:" % (step, size)
    return head + b"." * (size - len(head) - 1) + b"$"


def read_tensors(files: Mapping[str, bytes], path: str) -> int:
    """Return the step in a file, as torch.load reads it: whole, or not at all."""
    data = files.get(path)
    found = _HEAD.match(data) if data else None
    if data is None or found is None or len(data) != int(found[2]) or data[-1:] != b"$":
        raise TornError(path)
    return int(found[1])


def load(files: Mapping[str, bytes], habit: Habit) -> int:
    """Return the step from which a script goes on that finds these files; TornError if none."""
    if habit.has_best and "best.pt" in files:
        read_tensors(files, "best.pt")
    if habit.kind == "append":
        return files.get("results.txt", b"").count(b"\n")
    if habit.kind == "pair":
        if "model.pt" not in files:
            return 0
        steps = {read_tensors(files, name) for name in ("model.pt", "optimizer.pt")}
        if len(steps) > 1:
            raise TornError("optimizer.pt")
        return steps.pop()
    if habit.kind == "shards":
        if "latest" not in files:
            return 0
        folder = files["latest"].decode()
        names = [f"{folder}/shard-{part}.pt" for part in range(habit.pieces)]
        steps = {read_tensors(files, name) for name in names}
        if len(steps) > 1:
            raise TornError(names[-1])
        return steps.pop()
    names = sorted(name for name in files if re.fullmatch(r"(ckpt-\d+\.pt|last\.ckpt)", name))
    return read_tensors(files, names[-1]) if names else 0


class Script:
    """One start of it, on one machine."""

    def __init__(self, process: "SimulatedProcess", disk: Disk, habit: Habit) -> None:
        self.process, self.disk, self.habit = process, disk, habit
        self.host, self.plan = process.host, process.host.world.plan
        self.record = process.host.world.record
        self.signalled, self._is_told, self._must_stop = Event(), False, False
        self._logged, self._counter, self._saves = CLOCK.now, 0, 0
        self._held: list[Any] = []

    def run(self) -> int:
        habit, disk = self.habit, self.disk
        try:
            if habit.writes_at_start:
                disk.write(_SETTINGS, b'{"lr": 0.1}')
            self._sleep(habit.start_seconds)
            if habit.crash == "start":
                return self._fails("setup", "ValueError: no such option")
            step = self._begin()
            if habit.keeps_open:
                self._held = [disk.open(name, truncates=False) for name in habit.logs]
            return self._train(step)
        except _Exit as end:
            return end.code

    def _begin(self) -> int:
        habit, world = self.habit, self.host.world
        if habit.begins == "from scratch":
            if habit.kind == "append":
                self.disk.write("results.txt", b"")
            return 0
        try:
            step = load(self.disk.files, habit)
        except TornError as torn:
            world.tell(f"{self.host.machine.id[-4:]} cannot read {torn}")
            if habit.is_silent:
                return 0
            raise _Exit(
                self._fails("torch.load", f"RuntimeError: {torn} is not a zip archive")
            ) from None
        if step:
            self._sleep(self.plan.state_bytes / 2e9)
        return step

    def _train(self, step: int) -> int:
        plan, habit = self.plan, self.habit
        every = max(1, round(habit.save_every / plan.step_seconds))
        crash_at = math.ceil(0.6 * plan.steps) if habit.crash == "step" else math.inf
        self.host.step = self.record.reached = step
        self.record.is_saved = True
        while step < plan.steps:
            self._sleep(plan.step_seconds * CLOCK.luck.uniform(0.97, 1.02))
            step += 1
            self.record.reached = step
            if step >= crash_at:
                return self._fails("step", "ValueError: a bad batch")
            self._log(step)
            if habit.kind == "append":
                self._append(step)
            elif step % every == 0 or step == plan.steps or self._must_stop:
                self._save(step)
            if self._must_stop and step < plan.steps:
                return habit.handler_code
        (self.disk.root / "model").mkdir(exist_ok=True)
        (self.disk.root / "model" / "model.pt").write_bytes(tensors(step))
        return 0

    # -- what it writes

    def _append(self, step: int) -> None:
        self.disk.append("results.txt", _LINE % step)
        self.host.step = step

    def _log(self, step: int) -> None:
        if CLOCK.now - self._logged < self.habit.log_every:
            return
        self._logged = CLOCK.now
        if self.habit.reports:
            self.process.say(f"iter {step}: loss 0.5, time 1.00ms, mfu 1.00%")
        for name in self.habit.logs:
            self.disk.append(name, _LINE % step)
        if self.habit.has_database:
            self._counter += 1
            self.disk.write(_DATABASE, b"SQLite format 3\0" + b"%08d" % self._counter)

    def _save(self, step: int) -> None:
        habit, host = self.habit, self.host
        if habit.overwrites and host.step is not None:
            host.step = min(host.step, host.world.committed_step)
        if habit.deletes_first:
            self._prune(habit.keep_last - 1)
        act = {
            "rename": self._rename, "in place": self._in_place, "numbered": self._numbered,
            "shards": self._shards, "pair": self._pair,
        }[habit.kind]  # fmt: skip
        act(step)
        self._saves += 1
        if habit.has_best and self._saves % 3 == 1:
            self._write("best.pt", tensors(step, 2), habit.write_seconds / 2)
        if not habit.deletes_first:
            self._prune(habit.keep_last)
        if habit.says_when:
            self._commit()
        host.step, host.saved_at = step, CLOCK.now

    def _rename(self, step: int) -> None:
        name = "last.ckpt" if self.habit.keep_last == 1 else f"ckpt-{step:07d}.pt"
        self._write(f"{name}.tmp", tensors(step))
        self.disk.rename(f"{name}.tmp", name)

    def _in_place(self, step: int) -> None:
        self._write("last.ckpt", tensors(step))

    def _numbered(self, step: int) -> None:
        self._write(f"ckpt-{step:07d}.pt", tensors(step))

    def _pair(self, step: int) -> None:
        self._write("model.pt", tensors(step, 2))
        self._sleep(self.habit.pause_seconds)
        self._write("optimizer.pt", tensors(step, 2))

    def _shards(self, step: int) -> None:
        folder = f"step-{step:07d}"
        self.disk.make_folder(folder)
        for part in range(self.habit.pieces):
            self._write(f"{folder}/shard-{part}.pt", tensors(step, self.habit.pieces))
            self._sleep(self.habit.pause_seconds)
        self.disk.write("latest", folder.encode())

    def _write(self, path: str, data: bytes, seconds: float = -1.0) -> None:
        """Write a file over so many seconds, or its share of the save's."""
        seconds = self.habit.write_seconds / self.habit.pieces if seconds < 0 else seconds
        count = max(1, min(40, math.ceil(seconds)))
        size = -(-len(data) // count)
        with self.disk.open(path):
            for start in range(0, len(data), size):
                self.disk.write(path, data[start : start + size], at=start)
                self._sleep(seconds / count)

    def _prune(self, keep: int) -> None:
        """Delete the oldest saves that have names of their own."""
        disk, kind = self.disk, self.habit.kind
        if kind == "shards":
            folders = sorted({name.partition("/")[0] for name in disk.files if "/" in name})
            for folder in folders[: max(0, len(folders) - keep)]:
                for name in sorted(one for one in disk.files if one.startswith(f"{folder}/")):
                    disk.delete(name)
                disk.remove_folder(folder)
            return
        names = sorted(name for name in disk.files if re.fullmatch(r"ckpt-\d+\.pt", name))
        for name in names[: max(0, len(names) - keep)]:
            disk.delete(name)

    def _commit(self) -> None:
        """As training.commit does."""
        asked = TimedPath(self.process.variables["TRAINING_COMMIT_FILE"])
        asked.touch()
        self.disk.poke()
        while asked.exists():
            self._sleep(0.1)

    # -- its time, and its ends

    def _sleep(self, seconds: float) -> None:
        until = CLOCK.now + seconds
        while (left := until - CLOCK.now) > 0:
            if self._is_told:
                sleep(min(left, _PIECE))
            elif self.signalled.wait(min(left, _PIECE)):
                self._is_told = True
                if self.habit.handler == "exit":
                    sleep(CLOCK.luck.uniform(0.1, 3))
                    raise _Exit(self.habit.handler_code)
                self._must_stop = self.habit.handler == "save"
            self.host.world.has_progressed(self.host.machine, "step")

    def _fails(self, where: str, why: str) -> int:
        """A traceback, and exit code 1."""
        self.host.is_excused = True
        code = self.disk.root / "code" / "train.py"
        self.process.say("Traceback (most recent call last):")
        self.process.say(f'  File "{code}", line 7, in main')
        self.process.say(f"    {where}(path)")
        self.process.say(why)
        sleep(1)
        return 1
