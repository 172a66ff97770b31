"""An older version of the Guard and of the trainer, by what it knows of what the newer one keeps.

0.1.0's ledger and the head before xxh128: an older Guard forgets what it does not know, and writes
the rest; an older trainer refuses a head of a newer format. Which one a process is, it says itself.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from contract.keys import HEAD
from stacks.guard.ledger import Ledger, MachineAttempt
from tests.simulation.clock import CLOCK
from training.durable.record import head as head_file
from training.durable.record.head import Head

OLDER = "older"
# What 0.1.0 did not keep, and what it is for who reads it first.
_OF_LEDGER: Mapping[str, Any] = {
    "head_seen": 0.0, "looked": 0.0, "blind_until": 0.0, "resting": [], "by_day": {}, "limits": {},
}  # fmt: skip
_OF_ATTEMPTS: Mapping[str, Any] = {
    "progress": {}, "advanced": 0.0, "is_lost": False, "zone": "", "waited": 0.0,
}  # fmt: skip
_read, _write = vars(Ledger)["from_json"].__func__, Ledger.to_json
_read_head = vars(Head)["from_bytes"].__func__


def is_older() -> bool:
    """Whether the process that asks is of the older version."""
    return CLOCK.task is not None and CLOCK.process.version == OLDER


def _without(record: dict[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in record.items() if name not in names}


def _known(data: bytes) -> bytes:
    found = _without(json.loads(data), _OF_LEDGER)
    attempts = found.get("attempts", {})
    found["attempts"] = {name: _without(each, _OF_ATTEMPTS) for name, each in attempts.items()}
    return json.dumps(found).encode()


def _from_json(kind: type[Ledger], data: bytes) -> Any:
    try:
        return _read(kind, _known(data) if is_older() else data)
    except AttributeError as error:  # of what is no record at all
        raise ValueError(f"not a ledger of the Guard: {error}") from error


def _to_json(ledger: Ledger) -> bytes:
    return _known(_write(ledger)) if is_older() else _write(ledger)


def _from_bytes(kind: type[Head], data: bytes, name: str = HEAD) -> Any:
    if not is_older():
        return _read_head(kind, data, name)
    newest = head_file._WITHOUT_XXH128
    return head_file.read_json_record(name, data, newest, kind._from_record)


@contextmanager
def versioned() -> Iterator[None]:
    """Context in which processes of the older version know what it knew."""
    assert {*_OF_LEDGER} <= {*Ledger.__slots__} and {*_OF_ATTEMPTS} <= {*MachineAttempt.__slots__}
    patches = [
        mock.patch.object(Ledger, "from_json", classmethod(_from_json)),
        mock.patch.object(Ledger, "to_json", _to_json),
        mock.patch.object(Head, "from_bytes", classmethod(_from_bytes)),
    ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield
