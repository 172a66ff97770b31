"""What an attempt is doing, where its parent can read it after a SIGKILL; and the named points.

The board is a small file mapped into memory: what was written survives the process that wrote it.
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

from training.proof.torture.plan import Side, Trouble

_SLOT_BYTES = 64
_NUM_SLOTS = 6
_NUMBER = struct.Struct("<I")
# Longer than the budget of a notice that no step boundary answers.
_HELD_SECONDS = 3.0
# Work that takes so long is what a copy is staged for under such a budget.
_SLOW_SECONDS = 0.2
_NUM_SLOW = 2
NOTICE_FILE = "notice.json"
# What is begun in the extra time of a notice; the rest ends what was begun.
_WORK = ("preparation", "step", "evaluation")


class Board:
    """Of one rank: what its main thread does, what others do, store faults, where trouble struck,
    its process, and whether it worked on after a notice."""

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
        """One line, or an empty one."""
        data = self._memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]
        return bytes(data).rstrip(b"\0").decode(errors="replace")

    @property
    def phase(self) -> str:
        """What was being done: work beside the main thread is the rarer and tells more."""
        return self.read(1) or self.read(0) or "start-up"

    def count_fault(self) -> None:
        """Add one injected fault."""
        _NUMBER.pack_into(self._memory, 2 * _SLOT_BYTES, self.num_faults + 1)

    @property
    def num_faults(self) -> int:
        """Faults injected so far."""
        return int(_NUMBER.unpack_from(self._memory, 2 * _SLOT_BYTES)[0])

    def strike(self, phase: str) -> None:
        """Say that the named point was reached."""
        self.write(3, phase)

    @property
    def struck(self) -> str:
        """The phase of the named point, once it was reached."""
        return self.read(3)

    def begin(self, pid: int) -> None:
        """Say which process the rank is."""
        _NUMBER.pack_into(self._memory, 4 * _SLOT_BYTES, pid)

    @property
    def pid(self) -> int:
        """The rank's process; 0 before there is one."""
        return int(_NUMBER.unpack_from(self._memory, 4 * _SLOT_BYTES)[0])

    def say_extra(self) -> None:
        """Say that work was begun in the extra time of a notice."""
        self.write(5, "extra")

    @property
    def is_extra(self) -> bool:
        """Whether such work was begun."""
        return bool(self.read(5))


def send(trouble: Trouble, boards: Sequence[Board]) -> bool:
    """Signal the rank it is meant for, or all at once; False where that one is not there."""
    if trouble.notice_seconds is not None:
        _write_notice(boards[0].folder / NOTICE_FILE, trouble.notice_seconds)
    return send_signal(trouble.signal, trouble.aim, boards)


def send_signal(number: signal.Signals, aim: int | None, boards: Sequence[Board]) -> bool:
    """The same of any signal."""
    pid, leader = boards[aim or 0].pid, boards[0].pid
    if not pid:
        return False
    try:
        # Rank 0 leads a process group of all its ranks; whoever is not in it has ended.
        if aim is None:
            os.killpg(leader, number)
        elif os.getpgid(pid) == leader:
            os.kill(pid, number)
        else:
            return False
    except ProcessLookupError:
        return False
    return True


def _write_notice(path: Path, seconds: float) -> None:
    """As the guard on a machine writes it: whole or not at all."""
    when = datetime.now(UTC) + timedelta(seconds=seconds)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"action": "terminate", "time": when.isoformat()}))
    part.rename(path)


class Watch:
    """Writes a rank's board, and strikes at the named point of this attempt's trouble."""

    def __init__(
        self,
        boards: Sequence[Board],
        rank: int,
        trouble: Trouble | None,
        is_extra: Callable[[], bool],
    ) -> None:
        self.board = boards[rank]
        self._is_extra = is_extra
        self._boards = boards
        self._trouble = trouble if trouble and trouble.seen_by == rank else None
        self._counts: Counter[tuple[str, Side]] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Around one thing that the attempt does."""
        slot = 0 if threading.current_thread() is threading.main_thread() else 1
        before = self.board.read(slot)
        self.board.write(slot, phase)
        if phase in _WORK and self._is_extra():
            self.board.say_extra()
        self._reach(phase, "before")
        try:
            yield
            self._reach(phase, "after")
        finally:
            self.board.write(slot, before)

    def _reach(self, phase: str, side: Side) -> None:
        trouble = self._trouble
        if trouble is None or trouble.phase != phase or trouble.side != side:
            return
        with self._lock:
            self._counts[phase, side] += 1
            left = trouble.occurrence - self._counts[phase, side]
        if trouble.kind == "held" and 0 < left <= _NUM_SLOW:
            time.sleep(_SLOW_SECONDS)
        if left == 0:
            self.board.strike(phase)
            if not send(trouble, self._boards):
                self.board.strike("")
            # The thread that a signal wakes needs the interpreter.
            time.sleep(_HELD_SECONDS if trouble.kind == "held" else 0.01)
