"""All processes of a process machine: the session of its init and all its descendants."""

import contextlib
import os
import signal
import time

import psutil

KILL_SECONDS = 10.0


def list_processes(init: int) -> list[psutil.Process]:
    """List the running processes of the machine, including init."""
    found = {}
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == init:
                found[pid] = psutil.Process(pid)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    # A process that left the session is still a descendant: init adopts orphans (on Linux).
    with contextlib.suppress(psutil.NoSuchProcess):
        found |= {child.pid: child for child in psutil.Process(init).children(recursive=True)}
    return [process for process in found.values() if _is_alive(process)]


def kill_processes(init: int) -> int:
    """Kill everything except init until nothing is left; return the number of processes killed."""
    killed = set()
    give_up_at = time.monotonic() + KILL_SECONDS
    while others := [process for process in list_processes(init) if process.pid != init]:
        for process in others:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
            killed.add(process.pid)
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"processes survive SIGKILL: {others}")
        time.sleep(0.005)
    return len(killed)


def reap_orphans() -> None:
    """Reap exited children for which nothing in this process waits."""
    for child in psutil.Process().children():
        try:
            # Processes that init started lead a process group; asyncio waits for them.
            if child.status() == psutil.STATUS_ZOMBIE and os.getpgid(child.pid) != child.pid:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def freeze_process(pid: int) -> None:
    """Freeze a process, so that it cannot react while others are killed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
