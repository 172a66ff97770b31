"""Metrics as JSON lines: in a local file at once, in the store soon and before each commit. Events.

In the store, small objects are merged into large compressed ones in the background
(contract/metrics.py). A line is there at every moment, even after a kill between writing the large
object and deleting the small ones. An event, which records what happened to the run, is an object
of its own under events/. Imports no torch.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from contract.errors import UserError
from contract.keys import EVENTS, METRICS
from contract.metrics import MetricsObject, merge, metrics_objects, small_key
from training.durable.store.protocol import Store, StoreError, get_each

_log = logging.getLogger(__name__)

_FLUSH_SECONDS = 5.0
# While S3 is in trouble, an event goes on being sent behind what it reports, such as a notice.
_EVENT_SECONDS = 1.0
# How many of its own objects are merged at once: 21 minutes of them. The first merge comes soon
# after the start, for those that earlier attempts have left.
_MERGED = 256
_FIRST_MERGE = 12
# Before compression. A reader has one such object in memory at a time.
_MOST_BYTES = 8 * 1024 * 1024
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@dataclass(kw_only=True, slots=True)
class _Batch:
    """Lines being sent to one key."""

    key: str
    data: bytes
    sending: Future[None]


class Metrics:
    """Lines of one attempt, in numbered objects (contract/metrics.py).

    Lines that could not be sent are kept and sent again.
    """

    def __init__(self, store: Store, generation: int, nonce: str, local: Path | None) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._merging = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compaction")
        self._batches: list[_Batch] = []  # not known to have arrived; oldest first
        self._local: TextIO | None = None
        self._has_warned = False
        if local is not None:
            local.parent.mkdir(parents=True, exist_ok=True)
            self._local = local.open("a", buffering=1)
        self.begin_generation(generation, nonce)

    def begin_generation(self, generation: int, nonce: str) -> None:
        """Count the lines from here on as those of this generation."""
        with self._lock:
            self._send()
            self._writer = f"{generation:04d}-{nonce}"
            self._generation = generation
            self._sequence = 0

    def write(self, kind: str, **fields: object) -> None:
        """Add one line: on the local disk at once, in the store within seconds."""
        record = {"kind": kind, **fields, "generation": self._generation}
        line = _encode(record)
        with self._lock:
            self._lines.append(line)
            if self._local:
                try:
                    self._local.write(line + "\n")
                except OSError as error:  # of a full disk; alarms need the lines that follow
                    if not self._has_warned:
                        _log.warning("[metrics] %s; lines go on to the store", error)
                    self._has_warned = True
            is_free = all(batch.sending.done() for batch in self._batches)
            if is_free and time.monotonic() - self._flushed >= _FLUSH_SECONDS:
                self._send()

    def flush(self) -> None:
        """Wait until every line written so far is in the store; others may go on writing.

        StoreError if one could not be sent; it is sent again with the next lines.
        """
        with self._lock:
            self._send()
            sending = [batch.sending for batch in self._batches]
        for future in sending:
            future.result()

    def close(self) -> None:
        """Release the thread and the file; lines that were not flushed remain only on disk."""
        self._pool.shutdown(wait=False)
        self._merging.shutdown(wait=False, cancel_futures=True)
        local, self._local = self._local, None
        if local is not None:
            with suppress(OSError):  # of a full disk
                local.close()

    def _send(self) -> None:
        self._flushed = time.monotonic()
        self._batches = [batch for batch in self._batches if not self._has_arrived(batch)]
        if not self._lines:
            return
        data = ("\n".join(self._lines) + "\n").encode()
        self._lines = []
        self._sequence += 1
        key = small_key(self._writer, self._sequence)
        sending = self._pool.submit(self._store.put, key, data)
        self._batches.append(_Batch(key=key, data=data, sending=sending))
        if self._sequence % _MERGED == _FIRST_MERGE:
            self._merging.submit(compact, self._store, self._generation, least=_MERGED)

    def _has_arrived(self, batch: _Batch) -> bool:
        """Whether the batch is in the store; a failed one is sent again."""
        if not batch.sending.done():
            return False
        try:
            batch.sending.result()
        except StoreError as error:
            _log.warning(f"[metrics] {error}; retrying")
            batch.sending = self._pool.submit(self._store.put, batch.key, batch.data)
            return False
        return True


class SilentMetrics(Metrics):
    """The metrics of a rank above 0: dropped, as rank 0 has the numbers of all."""

    def __init__(self) -> None:
        """Needs no store."""

    def write(self, kind: str, **fields: object) -> None:
        """No-op."""

    def flush(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


def _encode(record: object) -> str:
    """Encode as JSON, which has no NaN or infinity: these rare numbers become null."""
    try:
        return _ENCODER.encode(record)
    except ValueError:
        return _ENCODER.encode(_finite(record))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return value


def compact(store: Store, generation: int, *, least: int = 1) -> None:
    """Merge the small objects of attempts up to `generation`; its own only if it has `least`.

    Never those of a later one: a writer that lost the lease has no say in them. What fails now is
    left to the next call.
    """
    try:
        sizes = store.sizes(METRICS)
        found = [one for one in metrics_objects(sizes) if one.generation <= generation]
        merged_already = _parts_of_merged(found)
        small = [one for one in found if not one.is_merged and one.key not in merged_already]
        if sum(one.generation == generation for one in small) < least:
            small = [one for one in small if one.generation < generation]
        for group in _groups(small, sizes):
            _replace(store, group)
        # Whoever merged them was killed before deleting them.
        store.delete(merged_already)
    except StoreError as error:
        _log.warning(f"[metrics] small objects were not merged: {error}")


def _groups(
    small: Sequence[MetricsObject], sizes: Mapping[str, int]
) -> Iterator[list[MetricsObject]]:
    """Yield consecutive objects in groups of at most `_MOST_BYTES`."""
    group: list[MetricsObject] = []
    size = 0
    for one in small:
        follows = group and (one.writer, one.first) == (group[-1].writer, group[-1].last + 1)
        if group and (not follows or size + sizes[one.key] > _MOST_BYTES):
            yield group
            group, size = [], 0
        group.append(one)
        size += sizes[one.key]
    if group:
        yield group


def _parts_of_merged(found: Sequence[MetricsObject]) -> set[str]:
    """Return the keys of small objects whose lines a merged one holds."""
    parts: set[str] = set()
    until: dict[str, int] = {}
    for one in found:
        if one.is_merged:
            until[one.writer] = max(one.last, until.get(one.writer, 0))
        elif one.last <= until.get(one.writer, 0):
            parts.add(one.key)
    return parts


def _replace(store: Store, group: list[MetricsObject]) -> None:
    keys = [one.key for one in group]
    contents = [stored.data for stored in get_each(store, keys) if stored is not None]
    if len(contents) == len(group):  # otherwise another writer is merging them
        store.put(*merge(group, contents))
        store.delete(keys)


class Events:
    """Writes events under one writer's name; nothing waits long for one that cannot be written."""

    def __init__(self, store: Store, writer: str) -> None:
        self._store = store
        self._writer = writer

    def emit(self, name: str, status: str = "info", **fields: object) -> None:
        """Write the event `name`; status is ok, failed or info."""
        now = datetime.now(UTC)
        record = {
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "instance_id": self._writer,
            "name": name,
            "status": status,
            "source": "trainer",
            **fields,
        }
        key = f"{EVENTS}{now.strftime('%Y%m%dT%H%M%S.%fZ')}-{self._writer}-{name}.json"
        data = json.dumps(record, allow_nan=False).encode()
        what = (name, key, data)
        sending = threading.Thread(target=self._send, args=what, name=f"event-{name}", daemon=True)
        sending.start()
        sending.join(_EVENT_SECONDS)

    @staticmethod
    def read(store: Store, name: str) -> list[dict[str, Any]]:
        """Return the run's events of this name, oldest first; ValueError if one is damaged."""
        keys = sorted(key for key in store.sizes(EVENTS) if key.endswith(f"-{name}.json"))
        found = [json.loads(one.data) for one in map(store.get, keys) if one]
        # `save-failed` ends as `failed` does.
        return [event for event in found if event["name"] == name]

    def _send(self, name: str, key: str, data: bytes) -> None:
        try:
            self._store.put(key, data)
        except (StoreError, UserError) as error:
            # The run does not depend on its events.
            _log.warning(f"[events] {name} was not written: {error}")


class SilentEvents(Events):
    """The events of a rank above 0: dropped, as rank 0 writes those of the run."""

    def __init__(self) -> None:
        """Needs no store."""

    def emit(self, name: str, status: str = "info", **fields: object) -> None:
        """No-op."""
