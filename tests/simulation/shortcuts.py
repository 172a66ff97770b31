"""What the simulation does quicker than the code that it stands for, with the same result.

`test_simulation.py` lives through a seed with and without them. They leave out no decision: a
head's text is put together from the one before, a request that meets no trouble is not prepared
for any, and records become dictionaries without copies of what never changes.
"""

import dataclasses
import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from contract.keys import HEAD
from tests.simulation.clock import CLOCK, sleep
from training.durable.record.head import Head, new_nonce
from training.durable.record.lease import Lease

_ATOMS = frozenset([str, int, float, bool, bytes, type(None)])
_NAMES: dict[type, tuple[str, ...]] = {}
_INITIAL: dict[type, tuple[str, ...]] = {}
_real_asdict, _real_replace = dataclasses.asdict, dataclasses.replace
_real_bytes, _real_beat = Head.to_bytes, Lease.beat


def quick_asdict(record: Any) -> dict[str, Any]:
    """Return what dataclasses.asdict does, but for atoms' copies."""
    kind = type(record)
    if kind not in _NAMES:
        _NAMES[kind] = tuple(each.name for each in dataclasses.fields(record))
    found = {}
    for name in _NAMES[kind]:
        value = getattr(record, name)
        found[name] = value if type(value) in _ATOMS else _plain(value)
    return found


def quick_replace(record: Any, **changes: Any) -> Any:
    """Return what dataclasses.replace does for a record whose fields are all its own."""
    kind = type(record)
    names = _INITIAL.get(kind)
    if names is None:
        fields = dataclasses.fields(record)
        names = _INITIAL[kind] = tuple(each.name for each in fields)
        assert all(each.init for each in fields), f"{kind} has fields that are not given"
    for name in names:
        if name not in changes:
            changes[name] = getattr(record, name)
    return kind(**changes)


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in _NAMES or dataclasses.is_dataclass(kind):
        return quick_asdict(value)
    if kind is list or kind is tuple:
        return kind([_plain(each) for each in value])
    if kind is dict:
        return {_plain(key): _plain(each) for key, each in value.items()}
    return _real_asdict(_Holder(value))["value"]


@dataclasses.dataclass
class _Holder:
    value: Any


class _HeadText:
    """A head's text, from the last one where only nonce and heartbeat differ."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[tuple[Any, ...], bytes, bytes]] = {}

    def to_bytes(self, head: Head) -> bytes:
        same = (
            head.generation, head.state, head.reason, head.weights_sha256, head.checkpoints,
            head.skipped_steps, head.unverified_by, head.run_id,
        )  # fmt: skip
        last = self._last.get(head.writer)
        if last is not None and all(a is b for a, b in zip(last[0], same, strict=True)):
            middle = f'"nonce": "{head.nonce}",\n "heartbeat": {head.heartbeat}'
            return b"".join((last[1], middle.encode(), last[2]))
        text = _real_bytes(head)
        start, end = text.index(b'"nonce": "'), text.index(b',\n "state"')
        self._last[head.writer] = same, text[:start], text[end:]
        return text


def _quick_beat(lease: Any) -> None:
    """Renew the lease at once where nobody else acts before the answer would have come.

    Nothing can then see that the lock was held, or that the request was on its way.
    """
    store, head = lease._store, lease._head
    plan = store._world.plan
    most = math.exp(plan.latency + 2.5)  # of 1e7 requests, few take longer
    if (
        head.state != "running"
        or lease.lost.is_set()
        or lease._unanswered
        or lease._lock.locked()
        or not CLOCK.is_alone_until(CLOCK.now + most)
        or not store.is_calm(8.0)
    ):
        _real_beat(lease)
        return
    bucket, key = store._world.bucket, store._prefix + HEAD
    versions = bucket.objects[key]
    if lease._etag != f'"{versions[-1].number}"' or versions[-1].data is None:
        _real_beat(lease)
        return
    after = quick_replace(head, heartbeat=head.heartbeat + 1, nonce=new_nonce())
    seconds = CLOCK.luck.lognormvariate(plan.latency, 0.5)
    wait = sleep if seconds > most else CLOCK.pass_by
    wait(seconds / 2)
    lease._etag = bucket.write(key, after.to_bytes())
    wait(seconds / 2)
    lease._head = after
    store.patience.is_reached = True


@contextmanager
def quick() -> Iterator[None]:
    """Context of all of them."""
    changed: list[tuple[Any, str, Callable[..., Any]]] = []
    for name, module in [*sys.modules.items()]:
        if name.startswith(("training.", "sizing.", "stacks.guard.")):
            for key, value in [*vars(module).items()]:
                if value is _real_asdict:
                    changed.append((module, key, quick_asdict))
                if value is _real_replace:
                    changed.append((module, key, quick_replace))
    text = _HeadText()
    patches = [mock.patch.object(*each) for each in changed]
    patches.append(mock.patch.object(Head, "to_bytes", lambda head: text.to_bytes(head)))
    patches.append(mock.patch.object(Lease, "beat", lambda lease: _quick_beat(lease)))
    for each in patches:
        each.start()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        for each in patches:
            each.stop()
