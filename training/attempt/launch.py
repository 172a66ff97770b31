"""Starts the other ranks of a machine with several GPUs from this process, the first one there.

Not torchrun: signals must reach the process that saves, torchrun turns exit code 75 into 1, and it
kills a rank 0 that is still uploading 30 s after the first other rank has exited. If torchrun is
used anyway, its variables are honoured. Imports no torch.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, TypeAlias

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# How long another rank may take to notice that rank 0 has exited, before it is killed.
_EXIT_SECONDS = 5.0


class RankProcess(Protocol):
    """A rank's process: the part of subprocess.Popen that is used here."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The pipe whose closing tells the rank that its machine's first one has exited."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; subprocess.TimeoutExpired after `timeout` seconds. For any thread."""

    def send_signal(self, sig: int) -> None:
        """Send a signal; no-op once the process has exited."""

    def kill(self) -> None:
        """Send SIGKILL."""


# Starts one rank, given its environment variables besides this process's own.
StartRank: TypeAlias = Callable[[Mapping[str, str]], RankProcess]


def interpreters(arguments: Sequence[str], scratch: Path) -> StartRank:
    """Start each rank in a new interpreter with this process's arguments."""

    def start(variables: Mapping[str, str]) -> RankProcess:
        return subprocess.Popen(
            [sys.executable, "-m", "training", *arguments, f"--scratch={scratch}"],
            env={**os.environ, **variables},
            # The pipe closes when this process exits, however that happens.
            stdin=subprocess.PIPE,
        )

    return start


class OtherRanks:
    """The other ranks of this machine; each exits by itself when this process does."""

    def __init__(
        self, start: StartRank, own_rank: int, num_here: int, num_ranks: int, rendezvous: str
    ) -> None:
        """This process is `own_rank`, the first of `num_here` here, of `num_ranks` in all."""
        self._processes = {
            own_rank + local: start(_variables(own_rank + local, local, num_ranks, rendezvous))
            for local in range(1, num_here)
        }

    def watch(self, when_lost: Callable[[str], None]) -> None:
        """Call `when_lost` with one sentence if a rank exits by itself."""
        for rank, process in self._processes.items():

            def wait(rank: int = rank, process: RankProcess = process) -> None:
                when_lost(f"rank {rank} exited with {process.wait()}")

            threading.Thread(target=wait, name=f"rank-{rank}", daemon=True).start()

    def show_stacks(self) -> None:
        """Make each rank print the stacks of its threads (faulthandler) and exit."""
        for process in self._processes.values():
            process.send_signal(signal.SIGABRT)

    def close(self) -> None:
        """End the other ranks, because this process ends."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def end_with_rank_0() -> None:
    """In a rank started by rank 0: exit when rank 0 does, even during a call that hangs.

    A process that is stopped, or hangs with the interpreter's lock, runs no thread to see the pipe
    close; Linux kills it, when the thread that started it, rank 0's main one, has ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        # Not sys.stdin.buffer: a thread that reads from it holds its lock, and Python aborts where
        # it cannot take that lock to close the stream at its end.
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)  # nothing reads this exit code

    threading.Thread(target=wait, name="rank-0", daemon=True).start()


def _variables(rank: int, local: int, num_ranks: int, rendezvous: str) -> Mapping[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(num_ranks),
        "TRAINING_RENDEZVOUS": rendezvous,
        "TRAINING_LEADER": "stdin",
    }
