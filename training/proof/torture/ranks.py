"""Ranks of an attempt of `torture` or `check`: forked before any thread starts, released later.

For the engine they replace ranks of its own launcher (training/attempt/launch.py), but start
seconds sooner: a rank waits at its pipe for its environment, and exits when the pipe closes, as
rank 0 has exited then.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from training.attempt.launch import RankProcess, end_with_rank_0
from training.attempt.world import RankEnvironment

_POLL_SECONDS = 0.005


class ForkedRanks:
    """All ranks above 0. Must be created in rank 0's process while that has one thread."""

    def __init__(self, num_processes: int, act: Callable[[int], int]) -> None:
        self._ranks: list[_ForkedRank] = []
        for rank in range(1, num_processes):
            self._ranks.append(_ForkedRank(rank, act, self._ranks))

    def start(self, variables: Mapping[str, str]) -> RankProcess:
        """Release the rank that these variables are for."""
        process = self._ranks[int(variables["RANK"]) - 1]
        # It may have been killed already, which `wait` will report.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(dict(variables)).encode() + b"\n")
        return process


class _ForkedRank:
    def __init__(self, rank: int, act: Callable[[int], int], before: "list[_ForkedRank]") -> None:
        reader, writer = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(writer, "wb", buffering=0)
        self.pid = os.fork()
        if self.pid == 0:
            for other in (*before, self):
                other.stdin.close()  # or that rank would not see it close
            os.dup2(reader, 0)
            sys.stdin = os.fdopen(0)
            os._exit(act(rank))
        os.close(reader)
        self._code: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutExpired after `timeout` seconds. For any thread."""
        began = time.monotonic()
        while (code := self._poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal; no-op once the process has exited."""
        if self._poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(9)

    def _poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code


def place_of(rank: int) -> RankEnvironment | None:
    """How this rank meets the others, once it is to start; None if rank 0 has exited before."""
    place = RankEnvironment.from_environment(os.environ)
    if rank and not place.rank:
        place = RankEnvironment.from_environment(_read_place())
        if not place.rank:
            return None
    if rank:
        end_with_rank_0()
    return place


def _read_place() -> dict[str, str]:
    """In a forked rank: wait for the variables of `start`; empty if rank 0 has exited."""
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(0, 1)  # not a byte more: the rest of the pipe is for `end_with_rank_0`
        if not read:
            return {}
        line += read
    variables: dict[str, str] = json.loads(line)
    return variables


def is_running(pid: int) -> bool:
    """Whether a process is alive, even if it is not this one's child (Linux)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
