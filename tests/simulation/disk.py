"""A machine's folder of a program: real, tiny files, whose times are virtual.

Nobody can set a file's time of change, so `TIMES` keeps it for each inode; `TimedPath` and
`FileState.of` tell it in place of the kernel's. A folder's state is one number, which each write
changes: `Past` knows every state that the folder of any machine of the run has had.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path, PosixPath
from typing import Any, Self

from tests.simulation.clock import CLOCK, wall
from training.durable.save.snapshots.listing import FileState

TIMES: dict[int, int] = {}  # by inode: when it last changed, by its machine's clock


def now_ns() -> int:
    return int(wall() * 1e9)


def changed_ns(inode: int) -> int:
    """Return when it changed; what the project writes is first looked at when it is new."""
    return TIMES.setdefault(inode, now_ns())


class _About:
    """A result of stat, with virtual times."""

    def __init__(self, found: os.stat_result) -> None:
        self._found = found
        self.st_ctime_ns = changed_ns(found.st_ino)
        self.st_ctime = self.st_ctime_ns / 1e9

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)


class TimedPath(PosixPath):
    """A path whose times of change are virtual."""

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        return _About(super().stat(follow_symlinks=follow_symlinks))

    def lstat(self) -> Any:
        return self.stat(follow_symlinks=False)

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        super().touch(mode, exist_ok)
        stamp(self)


def stamp(path: Path) -> None:
    """Give a file the times of a change now."""
    when = now_ns()
    os.utime(path, ns=(when, when))
    TIMES[os.stat(path).st_ino] = when  # noqa: PTH116 - not TimedPath's


def state_of(kind: type[FileState], found: os.stat_result) -> FileState:
    """FileState.of with virtual times."""
    made = _REAL_OF(kind, found)
    object.__setattr__(made, "ctime_ns", changed_ns(found.st_ino))
    return made


_REAL_OF: Any = vars(FileState)["of"].__func__


def number_of(path: str, data: bytes) -> int:
    text = path.encode() + b"\0" + data
    return int.from_bytes(blake2b(text, digest_size=16).digest(), "big")


def number_of_all(files: Mapping[str, bytes]) -> int:
    """Return the number of a folder's state: the order of its files makes no difference."""
    number = 0
    for path, data in files.items():
        number ^= number_of(path, data)
    return number


@dataclass(kw_only=True)
class Past:
    """All states of a run's folder, and how its logs have grown."""

    states: dict[int, float] = field(default_factory=lambda: {0: 0.0})  # when it was last so
    logs: frozenset[str] = frozenset()
    lines: dict[str, list[bytes]] = field(default_factory=dict)  # each log's texts, by their ends

    def note(self, number: int) -> None:
        self.states[number] = CLOCK.now

    def has_had(self, path: str, text: bytes) -> bool:
        """Whether a log has ever held this."""
        return any(each.startswith(text) for each in self.lines.get(path, ()))


class Disk:
    """The checkpoint folder of one machine, as its program writes it."""

    def __init__(self, root: Path, past: Past) -> None:
        self.root, self.past = TimedPath(root), past
        self.folder = self.root / "checkpoints"
        self.files: dict[str, bytes] = {}
        self.held: dict[tuple[int, int], str] = {}  # open for writing: device and inode
        self.number = 0  # of the state
        self.changes = 0
        self.watch: Callable[[], None] = lambda: None  # told of each change

    def begin(self) -> None:
        """Look at what a restore has left, before the program starts."""
        self.held.clear()
        self.files = dict(self._found())
        self.number = number_of_all(self._counted)
        for path in self.past.logs:
            if path in self.files:
                self.past.lines.setdefault(path, []).append(self.files[path])

    def _found(self) -> Iterator[tuple[str, bytes]]:
        for where, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(where, name)  # noqa: PTH118
                with open(path, "rb") as stream:  # noqa: PTH123
                    yield os.path.relpath(path, self.folder), stream.read()

    @property
    def _counted(self) -> dict[str, bytes]:
        return {path: data for path, data in self.files.items() if path not in self.past.logs}

    # -- what the program does

    def write(self, path: str, data: bytes, *, at: int | None = None) -> None:
        """Write some of a file, from `at` or, as a new content, from its start."""
        before = self.files.get(path, b"")
        new = data if at is None else before[:at] + data + before[at + len(data) :]
        place = self.folder / path
        with open(place, "r+b" if at is not None else "wb") as stream:  # noqa: PTH123
            stream.seek(at or 0)
            stream.write(data)
        stamp(place)
        self._now(path, new)

    def append(self, path: str, data: bytes) -> None:
        before, place = self.files.get(path, b""), self.folder / path
        with open(place, "ab") as stream:  # noqa: PTH123
            stream.write(data)
        stamp(place)
        self._now(path, before + data)

    def open(self, path: str, *, truncates: bool = True) -> "_Held":
        if truncates or path not in self.files:
            self.write(path, b"")
        found = os.stat(self.folder / path)  # noqa: PTH116
        return _Held(self, (found.st_dev, found.st_ino), path)

    def rename(self, path: str, to: str) -> None:
        os.rename(self.folder / path, self.folder / to)  # noqa: PTH104
        TIMES[os.stat(self.folder / to).st_ino] = now_ns()  # noqa: PTH116
        data = self.files.pop(path)
        self.number ^= number_of(path, data)  # both at once
        self._now(to, data)

    def delete(self, path: str) -> None:
        os.unlink(self.folder / path)  # noqa: PTH108
        self._now(path, None)

    def make_folder(self, path: str) -> None:
        os.makedirs(self.folder / path, exist_ok=True)  # noqa: PTH103

    def remove_folder(self, path: str) -> None:
        os.rmdir(self.folder / path)  # noqa: PTH106

    def close_all(self) -> None:
        """Its program has died."""
        self.held.clear()
        self.poke()

    def poke(self) -> None:
        self.changes += 1
        self.watch()

    def _now(self, path: str, data: bytes | None) -> None:
        if path not in self.past.logs:
            if path in self.files:
                self.number ^= number_of(path, self.files[path])
            if data is not None:
                self.number ^= number_of(path, data)
            self.past.note(self.number)
        elif data is not None:
            texts, before = self.past.lines.setdefault(path, []), self.files.get(path)
            texts[:] = [*(text for text in texts if text != before), data]
        if data is None:
            del self.files[path]
        else:
            self.files[path] = data
        self.poke()


class _Held:
    """A file that is open for writing."""

    def __init__(self, disk: Disk, key: tuple[int, int], path: str) -> None:
        self._disk, self._key = disk, key
        disk.held[key] = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._disk.held.pop(self._key, None)
