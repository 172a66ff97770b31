"""Metrics: JSON lines, at once into a local file, and in the store soon and before commits."""

import json
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from training.store import Store

_FLUSH_SECONDS = 5.0


class Metrics:
    """Lines of one attempt, in objects never rewritten: <generation>-<nonce>-<seq>.jsonl."""

    def __init__(self, store: Store, generation: int, nonce: str, local: Path | None) -> None:
        self._store = store
        self._prefix = f"metrics/{generation:04d}-{nonce}"
        self._generation = generation
        self._sequence = 0
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._sending: list[Future[None]] = []  # oldest first
        self._local: TextIO | None = None
        if local is not None:
            local.parent.mkdir(parents=True, exist_ok=True)
            self._local = local.open("a", buffering=1)

    def write(self, kind: str, **fields: object) -> None:
        """Add one line; it is on the local disk at once and in the store within seconds."""
        record = {"kind": kind, **fields, "generation": self._generation}
        line = json.dumps(_finite(record), separators=(",", ":"), allow_nan=False)
        with self._lock:
            self._lines.append(line)
            if self._local:
                self._local.write(line + "\n")
            is_free = all(sending.done() for sending in self._sending)
            if is_free and time.monotonic() - self._flushed >= _FLUSH_SECONDS:
                self._send()

    def flush(self) -> None:
        """Return when every line written so far is in the store; others may write meanwhile."""
        with self._lock:
            self._send()
            sending = list(self._sending)
        for one in sending:
            one.result()

    def close(self) -> None:
        """Release the thread and the file; lines not flushed stay local only."""
        self._pool.shutdown(wait=False)
        if self._local:
            self._local.close()

    def _send(self) -> None:
        self._flushed = time.monotonic()
        while self._sending and self._sending[0].done():
            self._sending.pop(0).result()  # raises what it met
        if not self._lines:
            return
        data = ("\n".join(self._lines) + "\n").encode()
        self._lines = []
        self._sequence += 1
        key = f"{self._prefix}-{self._sequence:05d}.jsonl"
        self._sending.append(self._pool.submit(self._store.put, key, data))


class SilentMetrics(Metrics):
    """Those of a rank above 0: rank 0 has the numbers of all."""

    def __init__(self) -> None:
        """Nothing is written anywhere."""

    def write(self, kind: str, **fields: object) -> None:
        """No-op."""

    def flush(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


def _finite(value: object) -> object:
    """JSON knows no NaN or infinity: such numbers become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return value
