"""A faulty store: errors, lost and late responses, conflicts, truncated bodies, a full disk.

It wraps any method of any store, so the shipped code itself is tested.
"""

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from contract.keys import CONFIG, HEAD, RECEIPT
from training.durable import AnswerLostError, Store, StoreError, Upload
from training.proof.injector import Injector

_log = logging.getLogger(__name__)
# Possible faults of each kind of operation, with weights.
_CONDITIONAL = {"500": 2, "lost answer": 3, "409": 2, "late": 3, "slow": 2}
_WRITE = {"500": 3, "lost answer": 3, "late": 1, "disk full": 2, "slow": 2}
_PART = {"500": 3, "lost answer": 3, "disk full": 2, "slow": 2}
_READ = {"503": 2, "cut body": 3, "slow": 2}
_SLOW_SECONDS = 0.4

_KINDS = {
    "put_if": _CONDITIONAL,
    "put": _WRITE,
    "put_file": _WRITE,
    "put a part": _PART,
    "finish": _PART,
    "delete_below": _WRITE,
    "delete": _WRITE,
}

_FOLDERS = {
    "artifacts": "artifact",
    "checkpoints": "upload",
    CONFIG: "config",
    "events": "event",
    "final": "final weights",
    "metrics": "metrics",
    RECEIPT: "receipt",
}


def misbehaving(store: Store, injector: Injector, rate: float, seed: int) -> Store:
    """Return the store with faults in a share `rate` of its operations."""
    return cast(Store, _FaultyStore(store, injector, rate, seed))


class _FaultyStore:
    """Forwards every call, reports its phase, and injects faults into some calls."""

    def __init__(self, store: Store, injector: Injector, rate: float, seed: int) -> None:
        self._store = store
        self._injector = injector
        self._rate = rate
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._head: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        key = str(arguments[0] if arguments else next(iter(named.values()), ""))
        act = partial(act, *arguments, **named)
        if name == "upload":
            return _FaultyUpload(self, key, act)
        if name == "put_if" and key == HEAD:
            phase = self._head_phase(json.loads(arguments[1]))
        else:
            phase = _phase(name, key)
        return self.perform(name, key, phase, act, arguments[-1] if arguments else None)

    def perform(
        self, name: str, key: str, phase: str, act: Callable[[], Any], target: object = None
    ) -> Any:
        """Act, or inject a fault; `target` is what a read fills."""
        with self._injector.doing(phase):
            fault = self._draw(name)
            if fault is None:
                return act()
            self._injector.status.count_fault()
            _log.info(f"[fault] {fault}: {name} {key} ({phase})")
            return self._inject(fault, name, key, act, target)

    def _draw(self, name: str) -> str | None:
        with self._lock:
            if self._rng.random() >= self._rate:
                return None
            kinds = _KINDS.get(name, _READ)
            return self._rng.choices(list(kinds), weights=list(kinds.values()))[0]

    def _inject(
        self, fault: str, name: str, key: str, act: Callable[[], Any], target: object
    ) -> Any:
        lost = AnswerLostError if name == "put_if" else StoreError
        if fault == "slow":
            time.sleep(self._rng.uniform(0, _SLOW_SECONDS))
            return act()
        if fault == "lost answer":
            act()
        elif fault == "late":
            seconds = self._rng.uniform(0, _SLOW_SECONDS)
            threading.Thread(target=_later, args=(seconds, act), daemon=True).start()
        elif fault == "cut body" and name in ("get_file", "read_into"):
            act()
            _damage(target)
            if self._rng.random() < 0.5:
                return None  # undetected here: the checksum must detect it
        raise lost(f"{key}: {fault} (injected)")

    def _head_phase(self, head: dict[str, Any]) -> str:
        before, self._head = self._head, head
        if head["generation"] != before.get("generation"):
            return "take-over"
        if head["state"] != "running" and head["checkpoints"] == before["checkpoints"]:
            return {"finished": "finish", "released": "release"}.get(head["state"], "failure")
        return "heartbeat" if head["heartbeat"] != before["heartbeat"] else "publication"


class _FaultyUpload(Upload):
    """An upload with faults in its parts and its end."""

    def __init__(self, store: _FaultyStore, key: str, begin: Callable[[], Upload]) -> None:
        self._store = store
        self._key = key
        self._phase = _phase("put", key)
        self._upload: Upload = store.perform("put a part", key, self._phase, begin)

    def put(self, number: int, start: int, data: memoryview, sha256: bytes) -> None:
        """Upload one part."""
        act = partial(self._upload.put, number, start, data, sha256)
        self._store.perform("put a part", self._key, self._phase, act)

    def is_ready(self) -> bool:
        """Whether another process takes orders."""
        return self._upload.is_ready()

    def put_shared(self, *arguments: Any) -> Iterator[tuple[int, bytes]]:
        """Have another process upload every part."""
        sent = self._upload.put_shared(*arguments)
        yield from self._store.perform("put a part", self._key, self._phase, lambda: list(sent))

    def finish(self) -> None:
        """Finish the upload."""
        self._store.perform("finish", self._key, self._phase, self._upload.finish)

    def abort(self) -> None:
        """Discard what was uploaded."""
        self._upload.abort()


def _phase(name: str, key: str) -> str:
    folder = key.partition("/")[0]
    if name.startswith("delete"):
        return "retention"
    if name not in _KINDS:
        return "resume" if folder == "checkpoints" else "reading"
    return _FOLDERS.get(folder, "writing")


def _damage(target: object) -> None:
    """Truncate a file, or zero the second half of a buffer, as after a broken connection."""
    if isinstance(target, Path):
        with target.open("r+b") as stream:
            stream.truncate(target.stat().st_size // 2)
    elif isinstance(target, memoryview):
        half = len(target) // 2
        target[half:] = bytes(len(target) - half)


def _later(seconds: float, act: Callable[[], Any]) -> None:
    """Complete a delayed request; its errors reach nobody."""
    time.sleep(seconds)
    try:
        act()
    except (OSError, StoreError) as error:
        _log.info(f"[fault] late: {error}")
