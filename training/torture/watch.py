"""What an attempt is doing, where its parent can read it after a SIGKILL; and the named points.

The board is a small file mapped into memory: what was written survives the process that wrote it.
"""

import mmap
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.torture.plan import Side, Trouble

_SLOT_BYTES = 64
_FAULTS = struct.Struct("<I")


class Board:
    """What the main thread does, what others do, a count of store faults, where trouble struck."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(4 * _SLOT_BYTES))
        with path.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), 4 * _SLOT_BYTES)

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
        _FAULTS.pack_into(self._memory, 2 * _SLOT_BYTES, self.num_faults + 1)

    @property
    def num_faults(self) -> int:
        """Faults injected so far."""
        return int(_FAULTS.unpack_from(self._memory, 2 * _SLOT_BYTES)[0])

    def strike(self, phase: str) -> None:
        """Say that the named point was reached."""
        self.write(3, phase)

    @property
    def struck(self) -> str:
        """The phase of the named point, once it was reached."""
        return self.read(3)


class Watch:
    """Writes the board, and strikes at the named point of this attempt's trouble."""

    def __init__(self, board: Board, trouble: Trouble | None) -> None:
        self.board = board
        self._trouble = trouble
        self._counts: Counter[tuple[str, Side]] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Around one thing that the attempt does."""
        slot = 0 if threading.current_thread() is threading.main_thread() else 1
        before = self.board.read(slot)
        self.board.write(slot, phase)
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
            is_now = self._counts[phase, side] == trouble.occurrence
        if is_now:
            self.board.strike(phase)
            os.kill(os.getpid(), trouble.signal)
            time.sleep(0.01)  # the thread that a signal wakes needs the interpreter
