"""Faults of this project's own history that lay between parts, each planted by one patch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from contract import verify
from stacks.guard import fleet, records
from training.durable.record.head import Retention
from training.durable.record.lease import Lease
from training.durable.save.tensors.checkpointer import Checkpointer


@dataclass(frozen=True)
class Fault:
    """A patch, and the word of the promise that it breaks; empty: any."""

    plant: Callable[[], Any]
    promise: str = ""

    def is_found(self, broken: Sequence[str]) -> bool:
        return any(self.promise in each for each in broken)


def _fault(owner: Any, name: str, value: Any, promise: str = "") -> Fault:
    return Fault(lambda: mock.patch.object(owner, name, value), promise)


def _unheard(self: Checkpointer, write: Any, *, may_leave: bool = False) -> bool:
    del self, may_leave
    return bool(write.wait())


def _delete_first(publish: Callable[..., None]) -> Callable[..., None]:
    """Delete what the retention drops before the head forgets it."""

    def wrong(self: Lease, entry: Any, *, retention: Retention, release: bool = False) -> None:
        kept = {each.name for each in retention.kept((*self.head.checkpoints, entry))}
        self._delete({each.name for each in self.head.checkpoints} - kept)
        publish(self, entry, retention=retention, release=release)

    return wrong


def _told_at_receipt(trace: Any, lacks: list[str]) -> Any:
    """Judge an answer by what was left when it began."""
    for life in verify._lives(trace):
        for notice in (each for each in life if each["name"] == "notice"):
            for each in life:
                if each.get("notice_to_commit_seconds", 0.0) > max(notice["seconds_left"], 1.0):
                    yield "an answer after its notice"


# Each with a seed that finds it.
FAULTS: Mapping[str, tuple[int, Fault]] = {
    "a save is a hang": (62, _fault(Checkpointer, "_await", _unheard, "for a cause")),
    "an answer judged from its boundary": (
        9,
        Fault(lambda: mock.patch.dict(verify.RULES, {"notices-answered": _told_at_receipt})),  # type: ignore[arg-type]
    ),
    "deleted before the head forgets": (
        23,
        _fault(Lease, "publish", _delete_first(Lease.publish), "deleted that the head names"),
    ),
    "the market's price ignored": (3, _fault(fleet, "spot_prices", lambda *_: {}, "stopped")),
    "versions of guard.json ignored": (24, _fault(records, "_versions", lambda *_: [])),
}
