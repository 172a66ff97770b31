"""A program's processes, from /proc: which live, what they may write to, and a stop for a moment.

Outside Linux none is known. SIGSTOP, not a cgroup's freezer: it needs no permission that a
supervisor may lack, and a program notices as little, because all its processes are below its keeper
and stop together.
"""

import os
import re
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from training.durable.save.snapshots.listing import Listing, SnapshotError

_PROC = Path("/proc")
_FLAGS = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)
_EXITING = 0x4  # PF_EXITING of linux/sched.h, set before the files are closed
_POLL_SECONDS = 0.001
# A process in a hanging system call does not stop; the others must not wait for it.
_STOP_SECONDS = 1.0


def living_below(root: int) -> set[int]:
    """Return a process and those below it that are alive: a killed one has lost its open files.

    An orphan belongs to a subreaper above it. Empty where there is no /proc.
    """
    return set(_from_the_top(root))


def _from_the_top(root: int) -> list[int]:
    """Return the same, parents before their children."""
    below, found = children(), list[int]()
    pending = [root] if below else []
    while pending:
        process = pending.pop()
        found.append(process)
        pending += below.get(process, [])
    return found


def children() -> dict[int, list[int]]:
    """Return all processes that are alive, by their parents."""
    found: dict[int, list[int]] = {}
    with suppress(OSError), os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdigit():
                with suppress(OSError):  # it has ended
                    state, parent, *_, flags = _about(entry.path)[:7]
                    if state not in b"ZX" and not int(flags) & _EXITING:
                        found.setdefault(int(parent), []).append(int(entry.name))
    return found


def cpu_seconds(roots: Collection[int]) -> float:
    """Return the CPU time of these processes and all that live below them."""
    ticks = 0
    for process in (one for root in roots for one in living_below(root)):
        with suppress(OSError):  # it has ended
            stat = (_PROC / str(process) / "stat").read_bytes().rpartition(b")")[2].split()
            ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def stopped(program: int | None) -> Iterator[None]:
    """Stop the program's processes and all others below its parent; SnapshotError if one does not
    stop. Processes that were stopped before stay stopped afterwards."""
    ours: list[int] = []
    try:
        _stop_all(_keeper_of(program), ours)
        yield
    finally:
        # Children first: a parent that sees one stopped may stop itself, as sudo and shells do.
        for process in reversed(ours):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def _stop_all(keeper: int, ours: list[int]) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    at_rest: list[int] = []
    # All were at rest before they were listed, so none was left to start another one.
    while (
        alive := [p for p in _from_the_top(keeper) if p not in (keeper, os.getpid())]
    ) != at_rest:
        at_rest = [process for process in alive if _is_stopped(process)]
        # A parent first: sudo stops itself at a child that it sees stopped, and one that waits for
        # its child's exec (vfork) cannot stop before it.
        above = {*at_rest, keeper, os.getpid()}
        for process in alive:
            if process not in at_rest and process not in ours:
                with suppress(OSError):  # it has ended
                    if _parent_of(process) in above:
                        ours.append(process)
                        os.kill(process, signal.SIGSTOP)
        if time.monotonic() > deadline:
            raise SnapshotError("a process of the program could not be stopped")
        time.sleep(0 if alive == at_rest else _POLL_SECONDS)


def _keeper_of(program: int | None) -> int:
    with suppress(OSError, TypeError):
        return _parent_of(program)
    has_proc = os.path.isdir(f"{_PROC}/self")  # noqa: PTH112 - as below
    why = "the program has just ended" if has_proc else "it can be stopped on Linux only"
    raise SnapshotError(f"it takes a program that stands still, and {why}")


def _parent_of(process: int | None) -> int:
    return int(_about(f"{_PROC}/{process}")[1])


def _is_stopped(process: int) -> bool:
    """Whether none of its threads runs."""
    with suppress(OSError), os.scandir(_PROC / str(process) / "task") as threads:
        return all(_about(thread.path)[0] in b"TtZX" for thread in threads)
    return False  # it has just ended


def _about(process: str) -> list[bytes]:
    """Return its stat's fields after the name in parentheses, which may hold anything: proc(5).

    Called for all processes of a machine, which may be thousands: pathlib took half of the time.
    """
    with open(f"{process}/stat", "rb", buffering=0) as stream:  # noqa: PTH123
        return stream.read().rpartition(b")")[2].split(maxsplit=7)


def held_open(listing: Listing) -> str | None:
    """Return a file that a process could write to now, logs aside; None if there is none."""
    files = listing.files.items()
    inodes = {f.file: path for path, f in files if not listing.is_log(path)}
    return min((repr(inodes[key]) for key in _open_for_writing(inodes)), default=None)


def _open_for_writing(inodes: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return those of the files, given as (device, inode), that a process could write to now."""
    found = set()
    alive = living_below(os.getpid())
    for process in (_PROC / str(number) for number in alive):
        with suppress(OSError), os.scandir(process / "fd") as entries:
            for entry in entries:
                with suppress(OSError):  # closed in the meantime
                    about = entry.stat()
                    key = (about.st_dev, about.st_ino)
                    if key in inodes and _is_writable(process / "fdinfo" / entry.name):
                        found.add(key)
    return found | mapped_for_writing(inodes, alive)


def mapped_for_writing(
    inodes: Collection[tuple[int, int]], processes: Collection[int] = ()
) -> set[tuple[int, int]]:
    """Return those that a process has mapped: it can change them without changing their times.

    It is one of these processes, or else this one or one below it.
    """
    # The device in /proc/PID/maps differs from stat's on some file systems.
    by_inode = {inode: (device, inode) for device, inode in inodes}
    found = set()
    for process in (_PROC / str(number) for number in processes or living_below(os.getpid())):
        with suppress(OSError, ValueError), (process / "maps").open("rb") as lines:
            for line in lines:
                _, permissions, _, _, inode, *_ = line.split(maxsplit=5)
                if permissions[1:2] == b"w" and permissions[3:4] == b"s":
                    found.add(by_inode.get(int(inode), (0, 0)))
    return found - {(0, 0)}


def _is_writable(fdinfo: Path) -> bool:
    flags = _FLAGS.search(fdinfo.read_text())
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
