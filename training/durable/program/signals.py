"""Which of a program's processes take a signal, from /proc: docs/container-contract.md.

A launcher takes none that its program does: it waits for a child, as shells and `accelerate launch`
do, or passes on what it gets, as inits and torchrun do, even to a child that would die of it.
"""

import re
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from training.durable.save.snapshots.processes import children

_PROC = Path("/proc")
_SHELL = re.compile(r"((ba|da|z|k|a)?sh|busybox)\n")
# They have a handler that ends their children or passes on what they get: by name, or as a script
# or module of Python's.
_LAUNCHER = re.compile(
    r"^(timeout|torchrun|pt_elastic|accelerate|uv|g?make|mpirun|mpiexec|orterun|prterun"
    r"|mpiexec\.hydra|hydra_pmi_proxy|poe|invoke|inv|honcho)\n"
    r"|^(just|task)\n([^\0]*/)?(just|task)\0"
    r"|^python[\d.]*\n[^\0]*\0((-[WX]\0[^\0]*|-\w+)\0)*("
    r"-m\0(torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.launch)"
    r"|(\S*/)?(torchrun|accelerate))\0"
)


def takers(roots: Collection[int], number: int) -> list[int] | None:
    """Return which of these processes and those below handle, ignore, block or await the signal.

    Of a process and what it has started only the first that does; None where there is no /proc.
    """
    below = children()
    found = [one for root in roots for one in _takers(root, number, below)]
    return found if below else None


def _takers(pid: int, number: int, below: dict[int, list[int]]) -> list[int]:
    with suppress(KeyError):  # it has ended
        masks, kids = _masks(pid, pid), below.get(pid, [])
        takes = _is_in(masks["SigCgt"] | masks["SigIgn"], number) or _outlives(pid, number)
        name = _text(pid, "comm") + _text(pid, "cmdline")
        is_init = _LAUNCHER.search(name) or _is_in(_awaited(pid, pid), signal.SIGCHLD)
        if is_init and kids:
            takes = False
        elif takes and _SHELL.match(name):
            # It runs its trap once its child in the foreground has ended; one in the background
            # ignores SIGINT, unlike its shell (POSIX), and is told by the trap.
            own = masks["SigIgn"]
            kids = [k for k in kids if not _is_in(_masks(k, k)["SigIgn"] & ~own, signal.SIGINT)]
        else:
            kids = [] if takes else _waited_for(pid, kids)
        return [pid] * takes + [one for kid in kids for one in _takers(kid, number, below)]
    return []


def _waited_for(pid: int, kids: list[int]) -> list[int]:
    """Return the children that it only waits for, by their end or by what they print."""
    where, given = _text(pid, "wchan"), _text(pid, "syscall").split()[1:3]
    named = [kid for kid in kids if kid in [int(one, 16) for one in given]]
    return kids if "pipe_read" in where else (named or kids) if "do_wait" in where else []


def _outlives(pid: int, number: int) -> bool:
    """Whether each of its threads blocks the signal or awaits it (sigwait, signalfd)."""
    threads = [int(path.name) for path in (_PROC / str(pid) / "task").glob("*")]
    return all(_is_in(_masks(pid, one)["SigBlk"] | _awaited(pid, one), number) for one in threads)


def _masks(pid: int, thread: int) -> dict[str, int]:
    found = re.findall(r"^(Sig\w+):\t(\w+)$", _text(pid, f"task/{thread}/status"), re.MULTILINE)
    return {name: int(mask, 16) for name, mask in found}


def _awaited(pid: int, thread: int) -> int:
    """Return the signals for which it is in sigwait: Linux lists them as not blocked meanwhile."""
    if "sigtimedwait" in _text(pid, f"task/{thread}/wchan"):
        with suppress(OSError), (_PROC / str(pid) / "mem").open("rb", buffering=0) as memory:
            memory.seek(int(_text(pid, f"task/{thread}/syscall").split()[1], 16))
            return int.from_bytes(memory.read(8), "little")
    return 0


def _text(pid: int, name: str) -> str:
    with suppress(OSError):  # it has ended, or may not be looked at
        return (_PROC / str(pid) / name).read_text(errors="replace")
    return ""


def _is_in(mask: int, number: int) -> bool:
    return bool(mask >> (number - 1) & 1)
