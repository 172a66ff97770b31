"""The end of a run, written without holding its lease: marked failed, or taken back.

Refuses a finished run, and one whose writer shows a heartbeat.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from contract.errors import UserError
from contract.keys import HEAD
from training.durable.record.head import CheckpointEntry, Head, new_nonce
from training.durable.store.protocol import PreconditionFailedError, Store, StoreError

_POLL_SECONDS = 1.0
# How often to try to mark a run failed between a holder's heartbeats.
_MARKS = 60


def mark_failed(store: Store, run_id: str, writer: str, reason: str) -> Head:
    """Mark a run failed without holding its lease; a finished run stays finished."""
    for _ in range(_MARKS):
        head, etag = Head.find(store)
        if head and head.is_ended:
            return head
        base = head or Head(run_id=run_id, generation=0, writer=writer, nonce="")
        failed = replace(base, nonce=new_nonce(), state="failed", reason=reason)
        try:
            failed.write(store, etag)
        except PreconditionFailedError:
            continue  # a heartbeat came in between
        return failed
    raise StoreError(f"{store.uri}/{HEAD} changes faster than it can be marked failed")


def with_way_back(reason: str, uri: str) -> str:
    """Return the reason of a failed run, with the command that reopens it."""
    return f"{reason}; take it back with: python -m training reopen --run-uri {uri}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reopened:
    """The head before and after."""

    before: Head
    after: Head

    @property
    def newest(self) -> CheckpointEntry | None:
        """What the next attempt resumes from, if it is undamaged."""
        newest = self.after.checkpoints[-1:]
        return newest[0] if newest and not newest[0].is_left_behind else None

    @property
    def dropped(self) -> Sequence[str]:
        """Names of the checkpoints that the head no longer names; the next attempt deletes them."""
        return [entry.name for entry in self.before.checkpoints[len(self.after.checkpoints) :]]


def reopen_run(
    store: Store,
    step: int | None,
    ttl_seconds: float,
    waiting: Callable[[str], None],
    *,
    from_scratch: bool = False,
) -> Reopened:
    """Release the run; with `step`, checkpoints after that one leave the head in the same write.

    `from_scratch` leaves all of them behind, and deletes none yet. A holder counts as gone once its
    head has not changed for one TTL; `waiting(writer)` is called before that wait.
    """
    while True:
        etag, head = _without_a_writer(store, ttl_seconds, waiting)
        checkpoints = head.checkpoints if step is None else _up_to(head, step, store.uri)
        released = replace(
            head,
            nonce=new_nonce(),
            state="released",
            reason=None,
            checkpoints=checkpoints,
            unverified_by=(),
        )
        if from_scratch:
            released = released.started_over()
        try:
            released.write(store, etag)
        except PreconditionFailedError:
            continue  # another writer came first: look again
        return Reopened(before=head, after=released)


def _without_a_writer(
    store: Store, ttl_seconds: float, waiting: Callable[[str], None]
) -> tuple[str | None, Head]:
    seen: str | None = None
    since = time.monotonic()
    while True:
        head, etag = Head.find(store)
        if head is None:
            raise UserError(f"no run found at {store.uri} (no {HEAD}); check the URI")
        if head.state == "finished":
            raise UserError(
                f"{store.uri} has finished; to train on, start a new run with --init-from "
                f"{store.uri}, and --extend-to to keep the optimizer's state"
            )
        if head.state != "running" or time.monotonic() - since >= ttl_seconds:
            return etag, head
        if seen is None:
            seen = etag
            waiting(head.writer)
        elif etag != seen:
            raise UserError(
                f"{store.uri} is held by {head.writer}, which is alive; stop that machine first"
            )
        time.sleep(min(_POLL_SECONDS, ttl_seconds / 10))


def _up_to(head: Head, step: int, uri: str) -> tuple[CheckpointEntry, ...]:
    """Return the checkpoints up to the newest of that step."""
    places = [place for place, entry in enumerate(head.checkpoints) if entry.step == step]
    if not places:
        there = ", ".join(str(known) for known in dict.fromkeys(e.step for e in head.checkpoints))
        raise UserError(
            f"{uri} has no checkpoint of step {step}; "
            + (f"it has those of steps {there}" if there else "it has none")
        )
    *earlier, last = head.checkpoints[: places[-1] + 1]
    chosen = (*earlier, replace(last, failed_starts=0))
    if last.is_left_behind:
        return tuple(replace(entry, is_left_behind=False) for entry in chosen)
    return chosen
