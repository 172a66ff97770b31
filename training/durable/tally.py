"""The time that making samples takes, by part, and counts of events. Standard library only.

A workload's samples wrap their reads in `with Tally.timed("read"):` and call
`Tally.count("replaced")` where something happens; loader workers send the sums along with each
batch. The time of a nested `timed` counts only for the inner one.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# Waiting for a sync to fetch a file; reading from the disk; decoding; and the loader's own part:
# the rest of making a batch, such as augmenting and stacking.
_Part: TypeAlias = Literal["sync", "read", "decode", "make"]


@dataclass(slots=True)
class Tally:
    """Seconds by part, of all threads and workers together, and counts by name."""

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Add another tally to this one."""
        for part, seconds in other.seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        for name, number in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + number

    @staticmethod
    def timed(part: _Part) -> "_Timed":
        """Add the seconds spent inside, less those of nested `timed` blocks, to a part."""
        return _Timed(part)

    @staticmethod
    def count(name: str, number: int = 1) -> None:
        """Count what happened while samples were made, such as an image that was replaced."""
        with _lock:
            _tally.counts[name] = _tally.counts.get(name, 0) + number

    @staticmethod
    def taken() -> "Tally":
        """Return this process's sums since the last call, and reset them."""
        global _tally
        with _lock:
            tally, _tally = _tally, Tally()
        return tally


class _Open(threading.local):
    """The seconds spent in `timed` blocks inside each open one of this thread, outermost first."""

    def __init__(self) -> None:
        self.inner: list[float] = []


_open = _Open()
_lock = threading.Lock()
_tally = Tally()


class _Timed:
    """A context manager; contextlib's would write to errors that pass through, some frozen."""

    __slots__ = ("_began", "_part")

    def __init__(self, part: _Part) -> None:
        self._part = part

    def __enter__(self) -> None:
        _open.inner.append(0.0)
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._began
        inner = _open.inner
        own = seconds - inner.pop()
        if inner:
            inner[-1] += seconds
        with _lock:
            _tally.seconds[self._part] = _tally.seconds.get(self._part, 0.0) + own
