"""Watches a program's processes, as a container's first process does: run by process.py.

    python -I -S keeper.py SOCKET_FD VIEW WORD...

It starts the program in its own session and adopts orphans of the program's processes. When the
first has ended, it tells its parent which others live; once none does, or its parent has ended or
closes the socket, it kills all that are left. Its parent watches it, by its socket, and if it is
killed the kernel kills the program. It imports nothing of this
project, so it starts in milliseconds; it writes only to that socket.

VIEW is a JSON list: a folder, one for what the program changes there, and names of files that it is
not to see. It sees an overlay of both, in a mount namespace that ends with it, so it cannot change
the folder's own files.
"""

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_CLONE_NEWNS, _CLONE_NEWUSER, _MS_PRIVATE = 0x20000, 0x10000000, 0x4000 | 1 << 18  # MS_REC, too
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
    code, other, text = None, 0, b""
    while True:
        # Outside Linux nobody wakes it when what the leader has left ends.
        readable, _, _ = select.select([parent, wakes], [], [], None if code is None else 0.2)
        if wakes in readable:
            wakes.recv(4096)
        if parent in readable:
            received = parent.recv(4096)
            if not received:
                break  # the parent has ended, or waits no longer
            *orders, text = (text + received).split(b"\n")
            for order in orders:
                _pass_on(*map(int, order.split()))
                with contextlib.suppress(OSError):
                    parent.sendall(b"sent 0\n")
        is_left = code is not None
        for pid, found in _reaped():
            if pid == leader:
                code = found
            other = other or found * is_left * (pid != leader)
        if code is not None and not _descendants(leader):
            break
        if code is not None and not is_left:
            parent.sendall(f"left {code}\n".encode())
    killed = _kill_all(leader)
    with contextlib.suppress(OSError):
        parent.sendall(f"ended {killed if code is None else code} {other}\n".encode())


def _show(view: Sequence[str]) -> int:
    """Mount the view, by a right to mount of its own if need be; return an error's number."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    folder, changes, *unseen = view
    try:
        _check(libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if user else 0)))
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _check(libc.mount(b"none", b"/", None, _MS_PRIVATE, None))
        # By descriptors, as names may hold what separates the options.
        lower, upper, work = (
            os.open(path, os.O_RDONLY) for path in (folder, f"{changes}/upper", f"{changes}/work")
        )
        options = f"lowerdir=/proc/self/fd/{lower},upperdir=/proc/self/fd/{upper}"
        about = f"{options},workdir=/proc/self/fd/{work},userxattr".encode()
        _check(libc.mount(b"overlay", os.fsencode(folder), b"overlay", 0, about))
    except (OSError, AttributeError) as error:  # no right to, or no Linux
        return getattr(error, "errno", None) or errno.ENOSYS
    for name in unseen:
        with contextlib.suppress(OSError):
            Path(folder, name).unlink()
    return 0


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "")


def _start(words: Sequence[str]) -> int:
    def die_with_keeper() -> None:
        if _IS_LINUX:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_keeper
    )
    process.returncode = 0  # it is reaped here, with all others
    return process.pid


def _pass_on(number: int, *pids: int) -> None:
    """Send a signal; the leader's id is its own until it is reaped, others were found just now."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _reaped() -> Iterator[tuple[int, int]]:
    """Reap what has ended; yield its id and exit code (-N: signal N)."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _kill_all(leader: int) -> int:
    """Kill every process of the program and wait for their ends; return the leader's exit code."""
    code, deadline = -signal.SIGKILL, time.monotonic() + _KILL_SECONDS
    while _descendants(leader) and time.monotonic() < deadline:
        for pid in _descendants(leader):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        code = dict(_reaped()).get(leader, code)
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
    _parent, _view = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    if _view and (_number := _show(_view)):
        _parent.sendall(f"bare {_number}\n".encode())
    _keep(_parent, sys.argv[3:])
