"""Reports an attempt's phase to its parent, even after a SIGKILL, and kills at named points.

The status is a small memory-mapped file: what was written survives the process that wrote it.
"""

import json
import mmap
import os
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from training.proof.torture.plan import Kill, Side

_SLOT_BYTES = 64
_NUM_SLOTS = 6
_NUMBER = struct.Struct("<I")
# Longer than the budget of a notice that comes far from a step boundary.
_HELD_SECONDS = 3.0
# Under such a budget, work of this length is long enough for a copy to be staged.
_SLOW_SECONDS = 0.2
_NUM_SLOW = 2
NOTICE_FILE = "notice.json"
# Phases that start new work in the extra time of a notice; others finish what was started.
_WORK = ("preparation", "step", "evaluation")


class StatusFile:
    """A rank's status: the phases of its main and other threads, the number of store faults, the
    phase in which it was hit, its process, and whether it trained on after a notice.
    """

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        if not path.exists():
            path.write_bytes(bytes(_NUM_SLOTS * _SLOT_BYTES))
        with path.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), _NUM_SLOTS * _SLOT_BYTES)

    def write(self, slot: int, text: str) -> None:
        """Replace one line."""
        data = text.encode()[:_SLOT_BYTES].ljust(_SLOT_BYTES, b"\0")
        self._memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES] = data

    def read(self, slot: int) -> str:
        """Return one line, which may be empty."""
        data = self._memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]
        return bytes(data).rstrip(b"\0").decode(errors="replace")

    @property
    def phase(self) -> str:
        """The current phase: that of another thread, which is rarer, or else of the main thread."""
        return self.read(1) or self.read(0) or "start-up"

    def count_fault(self) -> None:
        """Add one injected fault."""
        _NUMBER.pack_into(self._memory, 2 * _SLOT_BYTES, self.num_faults + 1)

    @property
    def num_faults(self) -> int:
        """Faults injected so far."""
        return int(_NUMBER.unpack_from(self._memory, 2 * _SLOT_BYTES)[0])

    def report_hit(self, phase: str) -> None:
        """Record that the named point was reached."""
        self.write(3, phase)

    @property
    def hit_phase(self) -> str:
        """The phase of the named point once it is reached, else empty."""
        return self.read(3)

    def begin(self, pid: int) -> None:
        """Record the rank's process."""
        _NUMBER.pack_into(self._memory, 4 * _SLOT_BYTES, pid)

    @property
    def pid(self) -> int:
        """The id of the rank's process; 0 before it starts."""
        return int(_NUMBER.unpack_from(self._memory, 4 * _SLOT_BYTES)[0])

    def report_extra_time(self) -> None:
        """Record that work was started in the extra time of a notice."""
        self.write(5, "extra")

    @property
    def has_used_extra_time(self) -> bool:
        """Whether work was started in the extra time of a notice."""
        return bool(self.read(5))


def send(kill: Kill, statuses: Sequence[StatusFile]) -> bool:
    """Signal the target rank, or all ranks at once; return whether it was there."""
    if kill.notice_seconds is not None:
        _write_notice(statuses[0].folder / NOTICE_FILE, kill.notice_seconds)
    return send_signal(kill.signal, kill.target_rank, statuses)


def send_signal(
    number: signal.Signals, target_rank: int | None, statuses: Sequence[StatusFile]
) -> bool:
    """Send a signal to one rank, or to all (None); return whether it was there."""
    pid, leader = statuses[target_rank or 0].pid, statuses[0].pid
    if not pid:
        return False
    try:
        # Rank 0 leads a process group of all its ranks; a process outside it has exited.
        if target_rank is None:
            os.killpg(leader, number)
        elif os.getpgid(pid) == leader:
            os.kill(pid, number)
        else:
            return False
    except ProcessLookupError:
        return False
    return True


def _write_notice(path: Path, seconds: float) -> None:
    """Write the notice atomically, as a machine's guard does."""
    when = datetime.now(UTC) + timedelta(seconds=seconds)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"action": "terminate", "time": when.isoformat()}))
    part.rename(path)


class Injector:
    """Writes a rank's status, and sends the attempt's kill at its named point."""

    def __init__(
        self,
        statuses: Sequence[StatusFile],
        rank: int,
        kill: Kill | None,
        is_in_extra_time: Callable[[], bool],
    ) -> None:
        self.status = statuses[rank]
        self._is_in_extra_time = is_in_extra_time
        self._statuses = statuses
        self._kill = kill if kill and kill.observed_rank == rank else None
        self._counts: Counter[tuple[str, Side]] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Context of one phase of the attempt."""
        slot = 0 if threading.current_thread() is threading.main_thread() else 1
        before = self.status.read(slot)
        self.status.write(slot, phase)
        if phase in _WORK and self._is_in_extra_time():
            self.status.report_extra_time()
        self._reach(phase, "before")
        try:
            yield
            self._reach(phase, "after")
        finally:
            self.status.write(slot, before)

    def _reach(self, phase: str, side: Side) -> None:
        kill = self._kill
        if kill is None or kill.phase != phase or kill.side != side:
            return
        with self._lock:
            self._counts[phase, side] += 1
            left = kill.occurrence - self._counts[phase, side]
        if kill.kind == "held" and 0 < left <= _NUM_SLOW:
            time.sleep(_SLOW_SECONDS)
        if left == 0:
            self.status.report_hit(phase)
            if not send(kill, self._statuses):
                self.status.report_hit("")
            # Give the thread that handles the signal a chance to run.
            time.sleep(_HELD_SECONDS if kill.kind == "held" else 0.01)
