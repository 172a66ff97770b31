"""Starts ranks 1 to N-1 beside this process, which is rank 0, on a machine with several GPUs.

Not by torchrun: signals must reach the process that saves, torchrun turns the exit code 75 into 1,
and it ends a rank 0 that still uploads 30 s after the first other rank has left. Where torchrun is
used all the same (several machines), its variables are honoured. Imports no torch.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, TypeAlias

# What another rank needs to see that rank 0 has ended, before it is killed.
_END_SECONDS = 5.0


class RankProcess(Protocol):
    """A rank's process, as subprocess.Popen gives it."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The pipe whose end tells the rank that rank 0 has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; subprocess.TimeoutExpired if it has none in time. From any thread."""

    def send_signal(self, sig: int) -> None:
        """Send a signal; no-op once it has ended."""

    def kill(self) -> None:
        """Send SIGKILL."""


# Starts one rank, given what its environment says beside this process's own.
StartRank: TypeAlias = Callable[[Mapping[str, str]], RankProcess]


def interpreters(arguments: Sequence[str], scratch: Path) -> StartRank:
    """Ranks in interpreters of their own, called with this process's arguments."""

    def start(variables: Mapping[str, str]) -> RankProcess:
        return subprocess.Popen(
            [sys.executable, "-m", "training", *arguments, f"--scratch={scratch}"],
            env={**os.environ, **variables},
            # Its end of the pipe closes when this process ends, however that happens.
            stdin=subprocess.PIPE,
        )

    return start


class Siblings:
    """The other ranks' processes; each ends by itself when this process does."""

    def __init__(self, start: StartRank, num_processes: int, rendezvous: Path) -> None:
        self._processes = [
            start(_variables(rank, num_processes, rendezvous)) for rank in range(1, num_processes)
        ]
        self._lost: queue.SimpleQueue[str] = queue.SimpleQueue()

    def watch(self, when_lost: Callable[[str], None]) -> None:
        """Call `when_lost` with one sentence if a rank ends by itself."""
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(
                target=self._wait, args=(rank, process, when_lost), name=f"rank-{rank}", daemon=True
            ).start()

    def lost(self, seconds: float) -> str | None:
        """Which of the ranks that are watched has ended by itself, or does so within the time."""
        try:
            return self._lost.get(timeout=seconds)
        except queue.Empty:
            return None

    def show_stacks(self) -> None:
        """Have each rank print where its threads are (faulthandler), and end."""
        for process in self._processes:
            process.send_signal(signal.SIGABRT)

    def close(self) -> None:
        """Rank 0 has ended: so do the others."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _wait(self, rank: int, process: RankProcess, when_lost: Callable[[str], None]) -> None:
        why = f"rank {rank} ended with {process.wait()}"
        self._lost.put(why)
        when_lost(why)


def end_with_rank_0() -> None:
    """In a rank that rank 0 has started: end when rank 0 does, also in a call that hangs."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)  # nobody asks for this code any more

    threading.Thread(target=wait, name="rank-0", daemon=True).start()


def _variables(rank: int, num_processes: int, rendezvous: Path) -> Mapping[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "TRAINING_RENDEZVOUS": rendezvous.absolute().as_uri(),
        "TRAINING_LEADER": "stdin",
    }
