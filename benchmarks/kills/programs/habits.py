"""Nine ways in which scripts save, in one script that checks each restore: `habits.py NAME`.

Each file begins with its step and its checksum. A torn file ends the script, as torch.load would;
files of several steps are reported and mixed, so that the result differs. Standard library only.
"""

import hashlib
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
import time
from pathlib import Path

STEPS, EVERY = 280, 40
STEP_SECONDS, PIECE_SECONDS = 0.05, 0.04
PIECES = 8
SIZE = 1 << 18
WORK_SECONDS = 200.0


class TornError(Exception):
    """A file whose content is not from one complete save."""


def say(**what):
    print(json.dumps({"at": time.time(), **what}), flush=True)


def pack(step, value, size=SIZE):
    body = value + hashlib.shake_256(value).digest(size)
    head = json.dumps([step, hashlib.sha256(body).hexdigest()])
    return head.ljust(79).encode() + b"\n" + body


def unpack(data, name):
    head, _, body = data.partition(b"\n")
    try:
        step, digest = json.loads(head)
    except ValueError:
        raise TornError(name) from None
    if hashlib.sha256(body).hexdigest() != digest:
        raise TornError(name)
    return step, body[:32]


def read(path):
    if not path.exists():
        raise TornError(f"{path.name} is missing")
    return unpack(path.read_bytes(), path.name)


def write(path, data):
    with path.open("wb") as file:
        for number in range(PIECES):
            part = len(data) // PIECES + 1
            file.write(data[number * part : (number + 1) * part])
            file.flush()
            time.sleep(PIECE_SECONDS / 2)


class InPlace:
    NAMES = ("model.bin", "optimizer.bin")

    def __init__(self, folder):
        self.folder = folder

    def save(self, step, value):
        for name in self.NAMES:
            write(self.folder / name, pack(step, value))

    def load(self):
        paths = [self.folder / name for name in self.NAMES]
        return [read(path) for path in paths] if any(map(Path.exists, paths)) else []

    def finished(self):
        """Whether the last save has finished."""
        return True


class Renamed(InPlace):
    NAMES = ("state.bin",)

    def save(self, step, value):
        write(self.folder / "state.tmp", pack(step, value, 2 * SIZE))
        (self.folder / "state.tmp").rename(self.folder / "state.bin")


class _Shards(InPlace):
    def save(self, step, value):
        names = [f"shard-{step}-{number}.bin" for number in range(4)]
        for name in names:
            write(self.folder / name, pack(step, value, SIZE // 2))
        (self.folder / "index.tmp").write_text(json.dumps(names))
        (self.folder / "index.tmp").rename(self.folder / "index.json")
        for path in self.folder.glob("shard-*"):
            if path.name not in names:
                path.unlink()

    def load(self):
        index = self.folder / "index.json"
        names = json.loads(index.read_text()) if index.exists() else []
        return [read(self.folder / name) for name in names]


class _Log(Renamed):
    """An atomic save, and a line for each step in a file that stays open."""

    def __init__(self, folder):
        super().__init__(folder)
        self.path = folder / "metrics.csv"
        self.seen = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        self.file = self.path.open("a")

    def stepped(self, step):
        self.file.write(f"{step},{step * 0.5}\n")
        self.file.flush()

    def load(self):
        found = super().load()
        rows = {row.partition(",")[0] for row in self.seen}
        lacking = [n for step, _ in found for n in range(1, step + 1) if str(n) not in rows]
        return [*found, (min(lacking) - 1, b"")] if lacking else found


class Rotating(InPlace):
    def save(self, step, value):
        folder = self.folder / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        for name in self.NAMES:
            write(folder / name, pack(step, value))
        link = self.folder / "latest.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.rename(self.folder / "latest")
        for old in sorted(self.folder.glob("checkpoint-*"), key=lambda p: int(p.name[11:]))[:-2]:
            shutil.rmtree(old)

    def load(self):
        latest = self.folder / "latest"
        return [read(latest / name) for name in self.NAMES] if latest.is_symlink() else []


class _Child(InPlace):
    """A child process that writes in place while the steps continue."""

    process = None

    def save(self, step, value):
        if self.process:
            self.process.join()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=super().save, args=(step, value))
        self.process.start()

    def finished(self):
        return self.process is None or not self.process.is_alive()


class SmallFiles(InPlace):
    NAMES = tuple(f"part-{number:03}.bin" for number in range(120))

    def save(self, step, value):
        for name in self.NAMES:
            (self.folder / name).write_bytes(pack(step, value, 4096))
            time.sleep(2 * PIECE_SECONDS * PIECES / len(self.NAMES) / 2)


class Sqlite(InPlace):
    """A database that stays open, with a write-ahead log."""

    def __init__(self, folder):
        super().__init__(folder)
        self.base = sqlite3.connect(folder / "state.db", isolation_level=None)
        try:
            self.base.execute("PRAGMA journal_mode=WAL")
            self.base.execute("CREATE TABLE IF NOT EXISTS parts (name PRIMARY KEY, data)")
        except sqlite3.DatabaseError as error:
            self.error = error

    error = None

    def save(self, step, value):
        self.base.execute("BEGIN")
        for name in range(PIECES):
            row = (name, pack(step, value, SIZE // 8))
            self.base.execute("INSERT OR REPLACE INTO parts VALUES (?, ?)", row)
            time.sleep(PIECE_SECONDS)
        self.base.execute("COMMIT")

    def load(self):
        try:
            if self.error:
                raise self.error
            rows = self.base.execute("SELECT name, data FROM parts").fetchall()
            if self.base.execute("PRAGMA integrity_check").fetchone() != ("ok",):
                raise TornError("state.db: integrity_check")
        except sqlite3.DatabaseError as error:
            raise TornError(f"state.db: {error}") from error
        return [unpack(data, f"row {name}") for name, data in rows]


class Mapped(InPlace):
    """A file that stays mapped, overwritten in place in two halves."""

    def __init__(self, folder):
        super().__init__(folder)
        self.path = folder / "state.map"
        self.length = len(pack(0, bytes(32)))
        if not self.path.exists():
            self.path.write_bytes(bytes(2 * self.length))
        self.file = self.path.open("r+b")
        self.map = mmap.mmap(self.file.fileno(), 0)

    def save(self, step, value):
        data = pack(step, value)
        for half in range(2):
            at = half * self.length
            for start in range(0, len(data), 1 << 15):
                end = min(start + (1 << 15), len(data))
                self.map[at + start : at + end] = data[start:end]
                time.sleep(PIECE_SECONDS / 2)
        self.map.flush()

    def load(self):
        halves = [bytes(self.map[at : at + self.length]) for at in (0, self.length)]
        if len(self.map) != 2 * self.length:
            raise TornError("state.map: its length")
        if not any(map(any, halves)):
            return []
        return [unpack(half, "state.map") for half in halves]


HABITS = {"in-place": InPlace, "renamed": Renamed, "shards": _Shards, "log": _Log}
HABITS |= {"rotating": Rotating, "child": _Child, "small-files": SmallFiles}
HABITS |= {"sqlite": Sqlite, "mapped": Mapped}


def answer(how):
    """Handle SIGTERM; return when to end after it, infinity before."""
    until = [float("inf")]

    def work(*_):
        until[0] = time.monotonic() + WORK_SECONDS

    handlers = {
        "ignored": signal.SIG_IGN,
        "exit 0": lambda *_: sys.exit(0),
        "exit 143": lambda *_: sys.exit(143),
        "works 200 s": work,
    }
    signal.signal(signal.SIGTERM, handlers[how])
    return until


def restored(habit):
    """Return the restored step and value; of mismatched files, a mixture that no save wrote."""
    try:
        found = habit.load()
    except TornError as error:
        say(restored=None, torn=str(error))
        raise
    steps = sorted({step for step, _ in found})
    if len(steps) > 1:
        say(restored=steps[-1], mismatched=steps)
        return steps[-1], hashlib.sha256(b"".join(value for _, value in found)).digest()
    say(restored=steps[0] if steps else 0)
    return found[0] if found else (0, bytes(32))


def main():
    name, commits = sys.argv[1], "--commit" in sys.argv
    until = answer(os.environ.get("ANSWER", "ignored"))
    folder = Path(os.environ["SM_CHECKPOINT_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    habit = HABITS[name](folder)
    start, value = restored(habit)
    pending = 0
    for step in range(start + 1, STEPS + 1):
        if time.monotonic() > until[0]:
            sys.exit(0)
        time.sleep(STEP_SECONDS)
        value = hashlib.sha256(value + str(step).encode()).digest()
        say(step=step, ids=[step])
        if isinstance(habit, _Log):
            habit.stepped(step)
        if step % EVERY == 0:
            say(saving=step)
            habit.save(step, value)
            pending = step
        if pending and habit.finished():
            if commits:
                from training import commit

                commit()
            say(saved=pending)
            pending = 0
    say(final=value.hex())


if __name__ == "__main__":
    main()
