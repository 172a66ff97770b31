"""A store that misbehaves: errors, lost and late answers, conflicts, cut bodies, a full disk.

It wraps a store of any kind and any of its methods, so that what is tested is what is shipped.
"""

import json
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from contract.keys import CONFIG, HEAD, RECEIPT
from training.proof.torture.watch import Watch
from training.store.protocol import AnswerLostError, Store, StoreError, Upload

# What each kind of operation can meet, with weights.
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


def misbehaving(store: Store, watch: Watch, rate: float, seed: int) -> Store:
    """The store, with a share `rate` of its operations going wrong."""
    return cast(Store, FaultyStore(store, watch, rate, seed))


class FaultyStore:
    """Passes every call on, watched, and breaks some of them."""

    def __init__(self, store: Store, watch: Watch, rate: float, seed: int) -> None:
        self._store = store
        self._watch = watch
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
            return FaultyUpload(self, key, act)
        if name == "put_if" and key == HEAD:
            phase = self._head_phase(json.loads(arguments[1]))
        else:
            phase = _phase(name, key)
        return self.attempt(name, key, phase, act, arguments[-1] if arguments else None)

    def attempt(
        self, name: str, key: str, phase: str, act: Callable[[], Any], target: object = None
    ) -> Any:
        """Act, if nothing happens; `target` is what a read fills."""
        with self._watch.doing(phase):
            fault = self._draw(name)
            if fault is None:
                return act()
            self._watch.board.count_fault()
            print(f"[fault] {fault}: {name} {key} ({phase})", flush=True)
            return self._break(fault, name, key, act, target)

    def _draw(self, name: str) -> str | None:
        with self._lock:
            if self._rng.random() >= self._rate:
                return None
            kinds = _KINDS.get(name, _READ)
            return self._rng.choices(list(kinds), weights=list(kinds.values()))[0]

    def _break(
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
                return None  # nobody noticed: the checksum must
        raise lost(f"{key}: {fault} (injected)")

    def _head_phase(self, head: dict[str, Any]) -> str:
        before, self._head = self._head, head
        if head["generation"] != before.get("generation"):
            return "take-over"
        if head["state"] != "running" and head["checkpoints"] == before["checkpoints"]:
            return {"finished": "finish", "released": "release"}.get(head["state"], "failure")
        return "heartbeat" if head["heartbeat"] != before["heartbeat"] else "publication"


class FaultyUpload:
    """An upload whose parts and whose end may fail."""

    def __init__(self, store: FaultyStore, key: str, begin: Callable[[], Upload]) -> None:
        self._store = store
        self._key = key
        self._phase = _phase("put", key)
        self._upload: Upload = store.attempt("put a part", key, self._phase, begin)

    def put(self, number: int, start: int, data: memoryview, sha256: bytes) -> None:
        """One part."""
        act = partial(self._upload.put, number, start, data, sha256)
        self._store.attempt("put a part", self._key, self._phase, act)

    def finish(self) -> None:
        """The end."""
        self._store.attempt("finish", self._key, self._phase, self._upload.finish)

    def abort(self) -> None:
        """Throw away what has arrived."""
        self._upload.abort()


def _phase(name: str, key: str) -> str:
    folder = key.partition("/")[0]
    if name.startswith("delete"):
        return "retention"
    if name not in _KINDS:
        return "resume" if folder == "checkpoints" else "reading"
    return _FOLDERS.get(folder, "writing")


def _damage(target: object) -> None:
    """Cut a file in half, or leave the second half of a buffer as a connection that broke would."""
    if isinstance(target, Path):
        with target.open("r+b") as stream:
            stream.truncate(target.stat().st_size // 2)
    elif isinstance(target, memoryview):
        half = len(target) // 2
        target[half:] = bytes(len(target) - half)


def _later(seconds: float, act: Callable[[], Any]) -> None:
    """A request that was on its way all the time; whatever it meets, nobody hears of it."""
    time.sleep(seconds)
    try:
        act()
    except (OSError, StoreError) as error:
        print(f"[fault] late: {error}", flush=True)
