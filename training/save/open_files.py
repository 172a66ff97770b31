"""Which files somebody has open for writing, or mapped into memory as writable and shared.

Read from /proc, for this process and those that it or its children started; elsewhere than on Linux
nothing is known, and a quiet time alone must do.
"""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_EXITING = 0x4  # PF_EXITING of linux/sched.h, set before the files are closed
_FLAGS = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)


def open_for_writing(inodes: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of the files, given as (device, inode), that a process could write to now."""
    found = set()
    for process in (_PROC / str(number) for number in processes()):
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
    for process in (_PROC / str(number) for number in processes()):
        with suppress(OSError, ValueError), (process / "maps").open("rb") as lines:
            for line in lines:
                _, permissions, _, _, inode, *_ = line.split(maxsplit=5)
                if permissions[1:2] == b"w" and permissions[3:4] == b"s":
                    found.add(by_inode.get(int(inode), (0, 0)))
    return found - {(0, 0)}


def processes() -> set[int]:
    """This process and all below it, as far as they live: a killed one has lost its open files.

    One that left its parent belongs to a subreaper above it.
    """
    children: dict[int, list[int]] = {}
    with suppress(OSError), os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdigit():
                with suppress(OSError):  # ended meanwhile
                    # After the name in parentheses, which may hold anything: proc(5).
                    about = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                    state, parent, flags = about[0], int(about[1]), int(about[6])
                    if state not in b"ZX" and not flags & _EXITING:
                        children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    pending = [os.getpid()] if children else []
    while pending:
        process = pending.pop()
        found.add(process)
        pending += children.get(process, [])
    return found


def _is_writable(fdinfo: Path) -> bool:
    flags = _FLAGS.search(fdinfo.read_text())
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
