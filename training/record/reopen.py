"""Taking a run back: the next attempt resumes a failed one, or any from a checkpoint of choice.

Refuses a finished run, and one whose writer shows a heartbeat. Imports no torch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from contract.keys import HEAD
from training.errors import UserError
from training.record.checkpoint_entry import CheckpointEntry
from training.record.head import Head, new_nonce, parse_head, started_over, write_head
from training.store.protocol import PreconditionFailedError, Store, Stored

_POLL_SECONDS = 1.0


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


def with_way_back(reason: str, uri: str) -> str:
    """The reason of a failed run with the command that takes the run back."""
    return f"{reason}; take it back with: python -m training reopen --run-uri {uri}"


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
    head has stood still for one TTL; `waiting(writer)` is called before that is awaited.
    """
    while True:
        found, head = _without_a_writer(store, ttl_seconds, waiting)
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
            released = started_over(released)
        try:
            write_head(store, released, found.etag)
        except PreconditionFailedError:
            continue  # somebody else wrote in between: look again
        return Reopened(before=head, after=released)


def _without_a_writer(
    store: Store, ttl_seconds: float, waiting: Callable[[str], None]
) -> tuple[Stored, Head]:
    seen: str | None = None
    since = time.monotonic()
    while True:
        found = store.get(HEAD)
        if found is None:
            raise UserError(f"no run found at {store.uri} (no {HEAD}); check the URI")
        head = parse_head(store, found)
        if head.state == "finished":
            raise UserError(
                f"{store.uri} has finished; to train on, start a new run with --init-from "
                f"{store.uri}, and --extend-to to keep the optimizer's state"
            )
        if head.state != "running" or time.monotonic() - since >= ttl_seconds:
            return found, head
        if seen is None:
            seen = found.etag
            waiting(head.writer)
        elif found.etag != seen:
            raise UserError(
                f"{store.uri} is held by {head.writer}, which is alive; stop that machine first"
            )
        time.sleep(min(_POLL_SECONDS, ttl_seconds / 10))


def _up_to(head: Head, step: int, uri: str) -> tuple[CheckpointEntry, ...]:
    """The checkpoints up to the newest of that step."""
    places = [place for place, entry in enumerate(head.checkpoints) if entry.step == step]
    if not places:
        there = ", ".join(str(known) for known in dict.fromkeys(e.step for e in head.checkpoints))
        raise UserError(
            f"{uri} has no checkpoint of step {step}; "
            + (f"it has those of steps {there}" if there else "it has none")
        )
    chosen = head.checkpoints[: places[-1] + 1]
    if chosen[-1].is_left_behind:
        return tuple(replace(entry, is_left_behind=False) for entry in chosen)
    return chosen
