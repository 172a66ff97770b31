"""Watches a program's processes, as a container's first process does: run by process.py.

    python -I -S keeper.py SOCKET_FD WORD...

It starts the program in its own session, adopts orphans of the program's processes, and kills
all of them once the program or its own parent has ended, for whatever reason. Its parent watches
it, by its socket, and if it is killed the kernel kills the program. It imports nothing of this
project, so it starts in milliseconds; it writes only to that socket.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_IS_LINUX = sys.platform == "linux"
# A process that the kernel does not let die (a disk that hangs) is left behind after this.
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.01


def _keep(parent: socket.socket, words: Sequence[str]) -> None:
    """Start the program, pass on signals that the parent names, and report its exit code."""
    wakes, waked = socket.socketpair()
    waked.setblocking(False)
    signal.set_wakeup_fd(waked.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        leader = _start(words)
    except OSError as error:
        parent.sendall(f"failed {error.errno or 0}\n".encode())
        return
    parent.sendall(f"started {leader}\n".encode())
    code, text = None, b""
    while code is None:
        readable, _, _ = select.select([parent, wakes], [], [])
        if wakes in readable:
            wakes.recv(4096)
        if parent in readable:
            received = parent.recv(4096)
            if not received:
                break  # the parent has ended
            *orders, text = (text + received).split(b"\n")
            for order in orders:
                # The leader has not been reaped since the last look, so its id is still its own.
                with contextlib.suppress(OSError):
                    os.kill(leader, int(order))
                    parent.sendall(b"sent 0\n")
        code = _reap(leader)
    killed = _kill_all(leader)
    with contextlib.suppress(OSError):
        parent.sendall(f"ended {killed if code is None else code}\n".encode())


def _start(words: Sequence[str]) -> int:
    def die_with_keeper() -> None:
        if _IS_LINUX:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_keeper
    )
    process.returncode = 0  # it is reaped here, with all others
    return process.pid


def _reap(leader: int) -> int | None:
    """Reap what has ended; return the program's exit code (-N: signal N) if it was among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == leader:
                code = os.waitstatus_to_exitcode(status)
    return code


def _kill_all(leader: int) -> int:
    """Kill every process of the program and wait for their ends; return the leader's exit code."""
    code, deadline = -signal.SIGKILL, time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        for pid in _descendants(leader):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == leader:
                    code = os.waitstatus_to_exitcode(found[1])
        except ChildProcessError:
            return code
        time.sleep(_POLL_SECONDS)
    return code


def _descendants(leader: int) -> list[int]:
    """Return all processes below this one; outside Linux, the leader's group."""
    if not _IS_LINUX:
        with contextlib.suppress(OSError):
            os.killpg(leader, 0)
            return [-leader]
        return []
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name in parentheses may hold anything, spaces and parentheses too.
                stat = (entry / "stat").read_text(errors="replace")
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    below, found = {os.getpid()}, list[int]()
    while new := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below.update(new)
        found += new
    return found


if __name__ == "__main__":
    _keep(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
