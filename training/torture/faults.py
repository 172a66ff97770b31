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

from training.head import HEAD
from training.store import AnswerLostError, Store, StoreError, Upload
from training.torture.watch import Watch

# What each kind of operation can meet, with weights.
_CONDITIONAL = {"500": 2, "lost answer": 3, "409": 2, "late": 3, "slow": 2}
_WRITE = {"500": 3, "lost answer": 3, "late": 1, "disk full": 2, "slow": 2}
_READ = {"503": 2, "cut body": 3, "slow": 2}
_SLOW_SECONDS = 0.4

_FOLDERS = {
    "artifacts": "artifact",
    "checkpoints": "upload",
    "config.json": "config",
    "events": "event",
    "final": "final weights",
    "metrics": "metrics",
    "receipt.json": "receipt",
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
        if name == "put_if" and key == HEAD:
            phase = self._head_phase(json.loads(arguments[1]))
        else:
            phase = _phase(name, key)
        made = self.meet(name, key, phase, act, arguments)
        return _FaultyUpload(made, self, key) if name == "upload" else made

    def meet(
        self, name: str, key: str, phase: str, act: Callable[[], Any], arguments: tuple[Any, ...]
    ) -> Any:
        """One operation, watched, which may go wrong."""
        with self._watch.doing(phase):
            fault = self._draw(name)
            if fault:
                self._watch.board.count_fault()
                print(f"[fault] {fault}: {name} {key} ({phase})", flush=True)
            return self._break(fault, name, key, act, arguments) if fault else act()

    def _draw(self, name: str) -> str | None:
        with self._lock:
            if self._rng.random() >= self._rate:
                return None
            kinds = _CONDITIONAL if name == "put_if" else _READ if _is_read(name) else _WRITE
            return self._rng.choices(list(kinds), weights=list(kinds.values()))[0]

    def _break(
        self, fault: str, name: str, key: str, act: Callable[[], Any], arguments: tuple[Any, ...]
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
        elif fault == "cut body" and name == "get_file":
            act()
            _cut(Path(arguments[1]))
            if self._rng.random() < 0.5:
                return None  # nobody noticed: the checksum must
        elif fault == "cut body" and name == "read_into":
            act()
            data = arguments[2]
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
            if self._rng.random() < 0.5:
                return None
        raise lost(f"{key}: {fault} (injected)")

    def _head_phase(self, head: dict[str, Any]) -> str:
        before, self._head = self._head, head
        if head["generation"] != before.get("generation"):
            return "take-over"
        if head["state"] != "running" and head["checkpoints"] == before["checkpoints"]:
            return {"finished": "finish", "released": "release"}.get(head["state"], "failure")
        return "heartbeat" if head["heartbeat"] != before["heartbeat"] else "publication"


class _FaultyUpload:
    """An object under way, every part of which may go wrong."""

    def __init__(self, upload: Upload, store: FaultyStore, key: str) -> None:
        self._upload = upload
        self._store = store
        self._key = key
        self.abort = upload.abort

    def put(self, *arguments: Any) -> None:
        self._meet("put_part", partial(self._upload.put, *arguments))

    def finish(self) -> None:
        self._meet("put_whole", self._upload.finish)

    def _meet(self, name: str, act: Callable[[], Any]) -> None:
        self._store.meet(name, self._key, _phase(name, self._key), act, ())


def _phase(name: str, key: str) -> str:
    folder = key.partition("/")[0]
    if name.startswith("delete"):
        return "retention"
    if _is_read(name):
        return "resume" if folder == "checkpoints" else "reading"
    return _FOLDERS.get(folder, "writing")


def _is_read(name: str) -> bool:
    return not name.startswith(("put", "upload", "delete"))


def _cut(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def _later(seconds: float, act: Callable[[], Any]) -> None:
    """A request that was on its way all the time; whatever it meets, nobody hears of it."""
    time.sleep(seconds)
    try:
        act()
    except (OSError, StoreError) as error:
        print(f"[fault] late: {error}", flush=True)
