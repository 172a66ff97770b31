"""How long a folder has stood still, and whether somebody could be writing to it.

Open and mapped files are read from /proc, for this process and those that it or its children
started; elsewhere than on Linux nothing is known, and a quiet time alone must do.
"""

import os
import re
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from training.save.listing import Listing
from training.save.process_tree import living_below

_PROC = Path("/proc")
_FLAGS = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)
_NOT_LOOKED = "a file, perhaps,"


@dataclass(kw_only=True, slots=True)
class QuietTime:
    """A folder as it was at each look."""

    listing: Listing | None = None
    since: float = 0.0  # monotonic: the first look at which it was as it is now
    # A file that somebody could write to, as far as is known of the folder as it is now.
    held_open: str | None = _NOT_LOOKED
    # Processes that lived when the last change was seen, and live: one of them made it.
    writers: set[int] = field(default_factory=set)
    # The first process of the program: what it wrote last before it died may be half of a file.
    program: int | None = None

    def look(self, listing: Listing) -> float:
        """Take note of the folder as it is now; return for how many seconds it has been so."""
        now, alive = time.monotonic(), living_below(os.getpid())
        if self.listing is None or self.listing.difference(listing) is not None:
            self.writers = alive
            self.since = now
            self.held_open = _NOT_LOOKED
        elif not self.writers <= alive:
            # One that died may have had a file half written: the death closed it.
            self.writers &= alive
            self.since = now
            self.held_open = _NOT_LOOKED
        self.listing = listing
        return now - self.since

    def is_closed(self) -> bool:
        """Whether nothing of the folder is open for writing now."""
        assert self.listing is not None
        self.held_open = held_open(self.listing)
        alive = living_below(os.getpid())
        has_died = bool(alive) and self.program not in (None, *alive)
        if has_died or not self.writers <= alive:
            self.held_open = _NOT_LOOKED
        return self.held_open is None

    @property
    def found_open(self) -> str | None:
        """The file that was found open at the last look; None if there was none, or no look."""
        return None if self.held_open == _NOT_LOOKED else self.held_open

    def seconds_until_now(self, listing: Listing) -> float:
        """For how long the folder was as it is now at the last look; 0 if it has changed since."""
        if self.listing is None or self.listing.difference(listing) is not None:
            return 0.0
        return time.monotonic() - self.since


def held_open(listing: Listing) -> str | None:
    """A file that a process could write to now, logs aside."""
    files = listing.files.items()
    inodes = {(f.device, f.inode): path for path, f in files if not listing.is_log(path)}
    return min((repr(inodes[key]) for key in _open_for_writing(inodes)), default=None)


def _open_for_writing(inodes: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of the files, given as (device, inode), that a process could write to now."""
    found = set()
    for process in (_PROC / str(number) for number in living_below(os.getpid())):
        with suppress(OSError), os.scandir(process / "fd") as entries:
            for entry in entries:
                with suppress(OSError):  # closed meanwhile
                    about = entry.stat()
                    key = (about.st_dev, about.st_ino)
                    if key in inodes and _is_writable(process / "fdinfo" / entry.name):
                        found.add(key)
    return found | mapped_for_writing(inodes)


def mapped_for_writing(inodes: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those that a process has mapped: it changes them without a change of their times."""
    # The device in /proc/PID/maps differs from stat's on some file systems.
    by_inode = {inode: (device, inode) for device, inode in inodes}
    found = set()
    for process in (_PROC / str(number) for number in living_below(os.getpid())):
        with suppress(OSError, ValueError), (process / "maps").open("rb") as lines:
            for line in lines:
                _, permissions, _, _, inode, *_ = line.split(maxsplit=5)
                if permissions[1:2] == b"w" and permissions[3:4] == b"s":
                    found.add(by_inode.get(int(inode), (0, 0)))
    return found - {(0, 0)}


def _is_writable(fdinfo: Path) -> bool:
    flags = _FLAGS.search(fdinfo.read_text())
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
