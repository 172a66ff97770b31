"""Decides whether a program's save is over: how long its folder was quiet, and how it saves.

Where nothing is known of its processes, a quiet time alone must do. A program's habit is
learned from its folder, to see the end of a save sooner, and so is which files only grow: nothing
is concluded from one save, or once two have differed; whatever is unclear waits for the full quiet
time.
"""

import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.durable.save.snapshots.listing import (
    FileState,
    Listing,
    Root,
    SnapshotError,
    is_named_log,
    list_folder,
)
from training.durable.save.snapshots.processes import held_open, living_below

_NOT_LOOKED = "a file, perhaps,"
# How many saves must have been alike.
_ALIKE = 3
_NUMBER = re.compile(r"[0-9]+")
# How much of a growing file's end must still be there at the next look.
_TAIL_BYTES = 4096
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_HEAD_BYTES = 512
# A name under which a file has rested for so long is none that lasts only while it is written.
_RESTED_NS = 1_000_000_000
# How SQLite's and LMDB's files begin, and what SQLite's have beside them.
_DATABASES = ((0, b"SQLite format 3\0"), (16, b"\xde\xc0\xef\xbe"))
_BESIDE = re.compile(r"-(wal|shm|journal)$")
# How often a larger file must have been saved meanwhile, if what grows is no text.
_SAVES = 2
# How often it must have grown.
_GROWTHS = 3
# With logs, how much longer than ever before the other files must have stayed as they are.
_OVERDUE_TIMES = 3
# Files that are further ahead of the clock are older than they seem: it was set back.
_AHEAD_NS = 60_000_000_000
# How often a file named like a log must have been rewritten to be none; once is a new log.
_REWRITES = 2
# How many times between two saves are remembered; of so many, one is an exception.
_GAPS, _FEW_GAPS = 16, 8


@dataclass(kw_only=True, slots=True)
class QuietTime:
    """A folder as it was at each look."""

    listing: Listing | None = None
    since: float = 0.0  # monotonic: the first look at which it was as it is now
    # A file that a process could write to, as far as is known since the last change.
    held_open: str | None = _NOT_LOOKED
    # Processes that have lived since the last change was seen: one of them made it.
    writers: set[int] = field(default_factory=set)
    # The program's first process: what it wrote just before it died may be half a file.
    program: int | None = None
    # For how long it stood still between two changes.
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS))
    earlier_gap: float | None = None  # the usual one in an earlier life
    ended: float = math.inf  # when the program had ended, as far as is known
    _seconds: float = 0.0  # at the last look
    _has_changed: bool = False

    @property
    def usual_gap(self) -> float | None:
        """How long it stands still between two saves; None if that is not known."""
        longest = sorted(self.gaps, reverse=True)
        return longest[len(longest) // _FEW_GAPS] if len(longest) > 1 else self.earlier_gap

    def look(self, listing: Listing, alive: set[int] | None = None) -> float:
        """Record the folder as it is now; return for how many seconds it has been unchanged.

        `alive` is what `living_below` says, if it was asked: it costs more than all else.
        """
        now, alive = time.monotonic(), living_below(os.getpid()) if alive is None else alive
        has_changed = self.listing is None or self.listing.difference(listing) is not None
        # A process that died may have left a file half written, which its death closed.
        if has_changed or not self.writers <= alive:
            self.writers = alive if has_changed else self.writers & alive
            if has_changed and self._has_changed and self._seconds:
                self.gaps.append(self._seconds)
            self._has_changed |= has_changed and self.listing is not None
            self.since, self.held_open = now, _NOT_LOOKED
        self.listing, self._seconds = listing, now - self.since
        return self._seconds

    def look_at(self, folder: Path) -> bool:
        """Record the folder, if it can be listed; return whether it has changed since."""
        before = self.listing
        with suppress(SnapshotError):
            self.look(list_folder(folder))
        now = self.listing
        return before is not None and now is not None and before.difference(now) is not None

    def is_closed(self) -> bool:
        """Whether no file of the folder is open for writing now."""
        assert self.listing is not None
        self.held_open = held_open(self.listing)
        if self.has_died():
            self.held_open = _NOT_LOOKED
        return self.held_open is None

    def has_died(self) -> bool:
        """Whether a process that wrote to it has died, which closes what is half written."""
        alive = living_below(os.getpid())
        return (bool(alive) and self.program not in (None, *alive)) or not self.writers <= alive

    @property
    def found_open(self) -> str | None:
        """The file that was found open at the last look; None if there was none, or no look."""
        return None if self.held_open == _NOT_LOOKED else self.held_open

    def seconds_until_now(self, listing: Listing) -> float:
        """For how long the folder has been as it is now; 0 if it changed since the last look."""
        if self.listing is None or self.listing.difference(listing) is not None:
            return 0.0
        return min(time.monotonic(), self.ended) - self.since


def plain(path: str) -> str:
    """Return a path without its numbers, which the next save's has, too."""
    return _NUMBER.sub("#", path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Burst:
    """The changes between two pauses, under names that the next save will have too."""

    names: Counter[str]
    numbers: tuple[tuple[int, ...], ...]  # those in the names of new files

    @classmethod
    def between(cls, before: Listing, after: Listing) -> "_Burst":
        """Return what was written; deletions make no difference."""
        files = [p for p, f in after.files.items() if before.files.get(p) != f]
        links = [path for path, to in after.links.items() if before.links.get(path) != to]
        names, numbers = Counter[str](), []
        for path in (path for path in [*files, *links] if not after.is_log(path)):
            name = path
            if path not in before.files and path not in before.links:
                # Numbers in the names of existing folders are not the save's own.
                known = max((f for f in before.folders if path.startswith(f"{f}/")), default="")
                rest = path[len(known) :]
                name = known + _NUMBER.sub("#", rest)
                numbers.append(tuple(map(int, _NUMBER.findall(rest))))
            names[name] += 1
        return cls(names=names, numbers=tuple(sorted(numbers)))

    @property
    def plain(self) -> Counter[str]:
        """The names without any number."""
        found = Counter[str]()
        for name, count in self.names.items():
            found[plain(name)] += count
        return found

    def may_follow(self, before: "_Burst") -> bool:
        """Whether both are saves of one kind, and not two parts of one.

        New files alone may be parts, such as `shard-2` after `shard-1`: an existing file must be
        written with them. And a name's first number must change, unlike that of `step10-part2`.
        """
        if self.names != before.names or len(self.numbers) == self.names.total():
            return False
        for mine, others in zip(self.numbers, before.numbers, strict=False):
            if mine and mine[:1] == others[:1]:
                return False
        return True

    def may_come_after_the_first(self, first: "_Burst") -> bool:
        """Whether the first one shows where such a save begins: it held all of it, or none."""
        mine, others = self.plain, first.plain
        return mine <= others or not mine.keys() & others.keys()


class SaveHabit:
    """Recognizes the pause that ends a save; it must see each pause."""

    def __init__(self) -> None:
        self._paused: Listing
        self._first: _Burst | None = None
        self._last: _Burst | None = None
        self._num_alike = 0
        self._is_regular = True
        self._is_end = False

    def begin(self, listing: Listing) -> None:
        """Start with the folder that the program starts with."""
        self._paused = listing

    def is_end(self, listing: Listing) -> bool:
        """Whether the folder, in a pause and with nothing open, holds a save like those before."""
        if self._paused.difference(listing) is not None:
            burst = _Burst.between(self._paused, listing)
            self._paused = listing
            if burst.names:
                self._is_end = self._learn(burst)
        return self._is_end

    def is_part(self, listing: Listing) -> bool:
        """Whether a part is missing of a save like those before, which were alike."""
        if self._last is None or not self._is_regular or self._num_alike < _ALIKE - 1:
            return False
        mine, usual = _Burst.between(self._paused, listing).plain, self._last.plain
        return bool(mine) and mine <= usual and mine != usual

    def _learn(self, burst: _Burst) -> bool:
        if self._first is None:
            self._first = burst
            return False
        last, self._last = self._last, burst
        if last is None:
            self._num_alike = int(burst.plain == self._first.plain)
        elif not burst.may_follow(last):
            self._is_regular = False
        self._num_alike += 1
        is_known = self._num_alike >= _ALIKE
        return self._is_regular and is_known and burst.may_come_after_the_first(self._first)


def _is_rewritten(old: FileState, new: FileState) -> bool:
    """Whether it is another file, or has been written without having grown."""
    is_other = new.file != old.file
    return is_other or (new.bytes <= old.bytes and new.mtime_ns != old.mtime_ns)


class Replacing:
    """Which files a program replaces as a whole: such a file vouches for itself, and no other.

    So where several are, none does: between two renames they are of two saves. What is not known to
    be replaced counts as written in place. What is renamed or deleted as soon as it is written had
    a temporary name, under which half of it harms nobody. A database is whole at any time, too,
    with the files beside it: that is its promise for a crash.
    """

    def __init__(self, folder: Root) -> None:
        self._folder = folder
        self._databases = set[str]()
        self._whole, self._temporary = set[str](), set[str]()
        self._in_place, self._rested = set[str](), set[str]()
        self.rewrites = Counter[str]()  # by path, since the last capture

    def look(self, before: Listing, now: Listing) -> None:
        """Compare two looks at the folder."""
        gone = {*map(plain, before.files)} - {*map(plain, now.files)}
        self._temporary |= gone - self._rested
        names = {file.file: plain(path) for path, file in before.files.items()}
        for path, new in now.files.items():
            old, name = before.files.get(path), plain(path)
            was_renamed = old is None and names.get(new.file) in self._temporary
            if was_renamed or (old is not None and old.file != new.file):
                self._whole.add(name)
            elif old == new and now.began_ns - new.ctime_ns > _RESTED_NS:
                self._rested.add(name)
            elif old is not None and (old.bytes, old.mtime_ns) != (new.bytes, new.mtime_ns):
                self._see_in_place(path)
                self.rewrites[path] += _is_rewritten(old, new)

    def in_place(self, listing: Listing) -> Listing:
        """Return what is written in place: files that are neither logs nor whole at any time."""
        files = listing.files.items()
        whole = self._whole - self._in_place - self._temporary
        vouching = whole | self._temporary if len(whole) < 2 else set[str]()
        intact = {f.file for p, f in files if plain(p) in vouching or self._is_of_database(p)}
        left = {p: f for p, f in files if f.file not in intact and not listing.is_log(p)}
        return replace(listing, files=left, links={}, folders={})

    def _see_in_place(self, path: str) -> None:
        if plain(path) not in self._in_place and path not in self._databases:
            with suppress(OSError), (self._folder / path).open("rb") as stream:
                head = stream.read(_HEAD_BYTES)
                if any(head[at:].startswith(mark) for at, mark in _DATABASES):
                    self._databases.add(path)
                    return
            self._in_place.add(plain(path))

    def _is_of_database(self, path: str) -> bool:
        return _BESIDE.sub("", path).replace("lock.mdb", "data.mdb") in self._databases


@dataclass(kw_only=True, slots=True)
class _Growth:
    """A file that has only grown since it was first seen."""

    state: FileState
    last: float  # when it was seen to grow
    since: float = 0.0  # its first growth
    times: int = 0
    rewrites: int = 0
    tail: bytes = b""
    head: bytes | None = None  # of one that is no text
    others: Counter[str] = field(default_factory=Counter)  # saves of others before its growth
    is_stream: bool = False  # it is no text, and has grown on after two saves of a larger one


class GrowingFiles:
    """Files that only grow, by text appended to them, such as a metrics.csv, or named like logs.

    A save that is being written grows too: only text counts that grows for longer than the quiet
    time, and each time ends with a complete line or has paused; of other files, those that go on
    to grow while a larger one is saved twice. A name counts until the file has been rewritten or
    replaced twice.
    """

    def __init__(self, root: Root, quiet_seconds: float, pause_seconds: float) -> None:
        self.logs: frozenset[str] | None = None
        self._root = root
        self._quiet_seconds = quiet_seconds
        self._pause_seconds = pause_seconds
        self._seen: dict[str, _Growth] = {}
        # By plain name: how often such a file was saved, when it last changed, its size.
        self.saves, self._changed, self._sizes = Counter[str](), dict[str, float](), Counter[str]()
        # When other files were last saved, or else the program started, and the longest in between.
        self.saved_ns, self.longest_ns = time.time_ns(), 0
        self._known = frozenset[str]()  # logs of earlier lives

    def resume(self, note: Mapping[str, Any]) -> None:
        """Go on with what an earlier life has learned, as its last snapshot records."""
        self._known, self.longest_ns = frozenset(note.get("logs", ())), note.get("longest_ns", 0)

    def look(self, listing: Listing) -> None:
        """Compare the folder with how it was at the last look."""
        now, before = time.monotonic(), self._seen
        self._count_saves(listing, now)
        self._seen, inodes = {}, {f.file for f in listing.files.values()}
        for path, state in listing.files.items():
            seen = before.get(path)
            if seen is None or (
                seen.state != state and not self._has_grown(path, seen, state, now)
            ):
                rewrites, old = (seen.rewrites, seen.state) if seen else (0, state)
                # A log that is rotated has another name now.
                is_rotated = old.inode != state.inode and old.file in inodes
                rewrites += _is_rewritten(old, state) and not is_rotated
                seen = _Growth(state=state, last=now, rewrites=rewrites)
            self._seen[path] = seen
        self.logs = frozenset(path for path, seen in self._seen.items() if self._is_log(path, seen))

    def captured(self, listing: Listing) -> None:
        """Note when other files were saved: in captures only, as lock files come and go."""
        if not listing.has_logs_only:
            self.longest_ns = max(self.longest_ns, listing.written_ns - self.saved_ns)
            self.saved_ns = max(self.saved_ns, listing.written_ns)

    def are_state(self, listing: Listing) -> bool:
        """Whether growth counts by itself, as nothing else is saved, or that has stopped.

        A program that resumes from a checkpoint must not find rows that it will write again.
        """
        age_ns = time.time_ns() - listing.written_ns
        is_recent = -_AHEAD_NS <= age_ns <= _OVERDUE_TIMES * self.longest_ns
        return listing.has_logs_only or not is_recent

    def _count_saves(self, listing: Listing, now: float) -> None:
        for path, state in listing.files.items():
            name, seen = plain(path), self._seen.get(path)
            if seen is None or seen.state != state:
                if now - self._changed.get(name, -math.inf) >= self._pause_seconds:
                    self.saves[name] += 1
                self._changed[name], self._sizes[name] = now, state.bytes

    def _is_log(self, path: str, seen: _Growth) -> bool:
        if seen.rewrites < _REWRITES and (is_named_log(path) or path in self._known):
            return True
        if seen.times < _GROWTHS or seen.last - seen.since < self._quiet_seconds:
            return False
        return seen.head is None or seen.is_stream

    def _has_grown(self, path: str, seen: _Growth, state: FileState, now: float) -> bool:
        """Whether it has only grown, with its old end still in place; record that growth."""
        old = seen.state
        if not old.may_grow_to(state):
            return False
        try:
            with (self._root / path).open("rb") as stream:
                stream.seek(old.bytes - len(seen.tail))
                is_kept = stream.read(len(seen.tail)) == seen.tail
                stream.seek(max(0, state.bytes - _TAIL_BYTES))
                tail = stream.read(min(_TAIL_BYTES, state.bytes))
                stream.seek(0)
                head = stream.read(_HEAD_BYTES)
        except OSError:
            return False
        has_paused = now - seen.last >= self._pause_seconds
        is_text = b"\n" in tail and not _NO_TEXT.search(tail)
        if not is_text or seen.head is not None:
            # A database counts in its head what follows.
            is_kept &= head.startswith(seen.head or b"")
            seen.head = seen.head or head[: old.bytes]
        elif not (tail.endswith(b"\n") or has_paused):
            return False
        if not is_kept:
            return False
        if not seen.times:
            seen.since, seen.others = now, self.saves.copy()
        seen.state, seen.tail, seen.last, seen.times = state, tail, now, seen.times + 1
        # A save that was written for long has grown, too, but never grows again.
        seen.is_stream = any(
            count - seen.others[name] >= _SAVES and self._sizes[name] > state.bytes
            for name, count in self.saves.items()
        )
        return True
