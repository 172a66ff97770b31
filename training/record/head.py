"""head.json: the lease on a run and its list of committed checkpoints, in one object.

Every change is one conditional write with its own nonce, so the store itself refuses a stale
writer. No two machines' clocks are compared, and safety never depends on the TTL. A candidate that
waits for the lease says so in an object of its own. Imports no torch.
"""

import json
import logging
import secrets
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from contract.keys import HEAD, WAITING
from training.record.checkpoint_entry import CheckpointEntry
from training.record.json_record import read_json_record, refuse_other_than_counts
from training.store.protocol import (
    AnswerLostError,
    PreconditionFailedError,
    Store,
    Stored,
    StoreError,
)

_log = logging.getLogger(__name__)

# Format 2 added part_bytes to files and is_best to checkpoints, format 3 seconds_left to them,
# format 4 is_tentative and failed_starts, format 5 is_left_behind, unverified_by and program_step.
_FORMAT = 5
_ATTEMPTS = 6
_BACKOFF_SECONDS = 0.1

State: TypeAlias = Literal["running", "released", "finished", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The content of head.json; checkpoints oldest first."""

    run_id: str
    generation: int
    writer: str
    nonce: str
    heartbeat: int = 0
    state: State = "running"
    reason: str | None = None
    weights_sha256: str | None = None
    checkpoints: tuple[CheckpointEntry, ...] = ()
    skipped_steps: tuple[int, ...] = ()  # they diverged: no attempt trains on them
    unverified_by: tuple[str, ...] = ()  # machines that could verify none of the checkpoints

    @property
    def is_ended(self) -> bool:
        """Whether the run has finished or failed for good."""
        return self.state in ("finished", "failed")

    def to_bytes(self) -> bytes:
        """The JSON to store."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str = HEAD) -> "Head":
        """Parse what `to_bytes` wrote; errors call it `name`."""
        return read_json_record(name, data, _FORMAT, cls._from_record)

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> "Head":
        checkpoints = tuple(map(CheckpointEntry.from_json, record.pop("checkpoints")))
        skipped = tuple(record.pop("skipped_steps", ()))
        unverified_by = tuple(record.pop("unverified_by", ()))
        counts = Counter(entry.name for entry in checkpoints)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{twice[0]} is named twice")
        refuse_other_than_counts(record, "generation", "heartbeat")
        if any(type(step) is not int for step in skipped):
            raise ValueError(f"the skipped steps are {skipped}")
        if record["state"] not in get_args(State):
            raise ValueError(f"the state {record['state']!r} is unknown")
        return cls(
            **record,
            checkpoints=checkpoints,
            skipped_steps=skipped,
            unverified_by=unverified_by,
        )


def read_head(store: Store) -> Head | None:
    """The current head, or None before the first attempt."""
    found = store.get(HEAD)
    return parse_head(store, found) if found else None


def parse_head(store: Store, found: Stored) -> Head:
    return Head.from_bytes(found.data, f"{store.uri}/{HEAD}")


def write_head(store: Store, head: Head, etag: str | None) -> str:
    """Write the head if its ETag is `etag`; if refused or unanswered, the nonce decides."""
    for attempt in range(_ATTEMPTS):
        try:
            return store.put_if(HEAD, head.to_bytes(), etag)
        except (PreconditionFailedError, AnswerLostError) as error:
            found = store.get(HEAD)
            if found and parse_head(store, found).nonce == head.nonce:
                return found.etag
            if isinstance(error, PreconditionFailedError) or (found and found.etag) != etag:
                raise PreconditionFailedError(str(error)) from error
            time.sleep(_BACKOFF_SECONDS * 2**attempt)
    raise StoreError(f"{store.uri}/{HEAD}: no response to {_ATTEMPTS} writes in a row")


def started_over(head: Head) -> Head:
    """The head without a checkpoint to resume from; it names them until retention drops them."""
    left = tuple(replace(entry, is_left_behind=True) for entry in head.checkpoints)
    return replace(head, checkpoints=left, unverified_by=())


def mark_failed(store: Store, run_id: str, writer: str, reason: str) -> Head:
    """Mark a run failed without holding its lease; a finished run stays finished."""
    for _ in range(10 * _ATTEMPTS):
        found = store.get(HEAD)
        head = parse_head(store, found) if found else None
        if head and head.is_ended:
            return head
        base = head or Head(run_id=run_id, generation=0, writer=writer, nonce="")
        failed = replace(base, nonce=new_nonce(), state="failed", reason=reason)
        try:
            write_head(store, failed, found.etag if found else None)
        except PreconditionFailedError:
            continue  # a heartbeat came in between
        return failed
    raise StoreError(f"{store.uri}/{HEAD} changes faster than it can be marked failed")


def new_nonce() -> str:
    return secrets.token_hex(8)


def say_waiting(store: Store, generation: int, writer: str) -> None:
    """Say that `writer` waits for the holder of this generation; a failure costs only seconds."""
    record = {"generation": generation, "writer": writer}
    try:
        store.put(WAITING, json.dumps(record).encode())
    except StoreError as error:
        _log.warning(f"[lease] could not tell the holder that this machine waits: {error}")


def is_waited_for(store: Store, generation: int) -> bool:
    """Whether a candidate waits for this generation's holder, not for an earlier one."""
    try:
        found = store.get(WAITING)
        return found is not None and json.loads(found.data)["generation"] == generation
    except (StoreError, ValueError, KeyError, TypeError):
        return False
