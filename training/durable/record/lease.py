"""The lease on a run: the right to write its state; and a run's end, written without holding it.

Every change is one conditional write of head.json, so the store itself refuses a stale writer. No
two machines' clocks are compared, and safety never depends on the TTL. Without the lease a run can
be marked failed or reopened, not if it has finished or its writer shows a heartbeat. Imports no
torch.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from contract.errors import Exit, UserError
from contract.keys import CHECKPOINTS, EVENTS, HEAD, checkpoint_prefix, generation_in
from training.durable.errors import AttemptEndedError, InterruptedRunError
from training.durable.record.head import (
    KEEP_NEWEST,
    CheckpointEntry,
    Head,
    Retention,
    State,
    announce_waiting,
    new_nonce,
)
from training.durable.store.protocol import (
    PreconditionFailedError,
    Store,
    StoreError,
    put_unless_changed,
)

_log = logging.getLogger(__name__)

# A predecessor that has lost the lease can get in between once.
_PUT_ATTEMPTS = 3
# How many machines must agree that no checkpoint can be verified. One may be faulty itself.
_WITNESSES = 2


class LeaseLostError(AttemptEndedError):
    """Another writer has taken over the run; nothing more may be written."""

    exit_code = Exit.LEASE_LOST


class Lease:
    """The right to write a run's state, from `acquire`; any method may raise LeaseLostError."""

    def __init__(self, store: Store, head: Head, etag: str | None, ttl_seconds: float) -> None:
        self.lost = threading.Event()
        self._store = store
        self._head = head
        # Nonces of writes without a response: if one shows up later, that write was ours.
        self._unanswered: set[str] = set()
        self._abandoned: set[str] = set()  # checkpoints that were not published
        self._unkept: set[str] = set()  # checkpoints that no head will name again
        self._ttl_seconds = ttl_seconds
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._deleting = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._etag: str | None = head.write(store, etag)
        except PreconditionFailedError as error:
            raise self._lose() from error

    @property
    def head(self) -> Head:
        """The head as last written by this lease."""
        return self._head

    def begin_generation(self, skipped_steps: tuple[int, ...]) -> None:
        """Go on as the next generation: what it writes wins over what this one has written.

        Skipped steps stay skipped for every later attempt.
        """
        self._change(
            lambda head: replace(head, generation=head.generation + 1, skipped_steps=skipped_steps)
        )

    def check(self) -> None:
        """Raise LeaseLostError if a write has found another writer."""
        if self.lost.is_set():
            raise self._lose()

    def start_heartbeat(self) -> None:
        """Renew the lease every third of a TTL, in a thread."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def publish(
        self, entry: CheckpointEntry, *, retention: Retention = KEEP_NEWEST, release: bool = False
    ) -> None:
        """Commit a checkpoint whose files are stored, and drop those not retained from the head."""
        with self._publishing:
            self.check()
            state: State = "released" if release else "running"

            def publish(head: Head) -> Head:
                if head.state != "running":  # ended by another thread
                    raise StoreError(f"{self._store.uri} is {head.state}: this is not committed")
                kept = retention.kept((*head.checkpoints, entry))
                return replace(head, checkpoints=kept, state=state, unverified_by=())

            before, after = self._change(publish)
            abandoned = set(self._abandoned)
            self._abandoned -= abandoned
            names = {known.name for known in (*before.checkpoints, entry)} | abandoned
            self._unkept |= names - {kept.name for kept in after.checkpoints}
        if release:
            self._stop.set()

    def count_failed_starts(self, began: CheckpointEntry, times: int) -> None:
        """Note how often a program that began with this snapshot has failed while it read it.

        Later tentative snapshots hold what it held, and get the same count.
        """

        def count(entry: CheckpointEntry) -> CheckpointEntry:
            is_later = entry.is_tentative and entry.step > began.step
            if entry.name != began.name and not is_later:
                return entry
            return replace(entry, failed_starts=max(times, entry.failed_starts))

        self._change(lambda head: replace(head, checkpoints=tuple(map(count, head.checkpoints))))

    def keep(self, began: CheckpointEntry) -> int:
        """Keep this snapshot as the run's best, unless it has one; return which one is kept."""

        def mark(head: Head) -> Head:
            if any(entry.is_best for entry in head.checkpoints):
                return head
            names = [replace(e, is_best=e.name == began.name) for e in head.checkpoints]
            return replace(head, checkpoints=tuple(names))

        _, after = self._change(mark)
        return next((e.step for e in after.checkpoints if e.is_best), began.step)

    def count_unverified(self) -> bool:
        """Record that this machine can verify no checkpoint; return if the run starts over now.

        It does once two machines agree. Nothing is deleted: what is left behind stays in the head.
        """

        def count(head: Head) -> Head:
            machines = tuple(dict.fromkeys((*head.unverified_by, head.writer)))
            if len(machines) < _WITNESSES:
                same = machines == head.unverified_by
                return head if same else replace(head, unverified_by=machines)
            return head.started_over()

        _, after = self._change(count)
        return all(entry.is_left_behind for entry in after.checkpoints)

    def start_over(self) -> None:
        """Leave all checkpoints behind; they stay in the head until retention drops them."""
        self._change(Head.started_over)

    def forget_unverified(self) -> None:
        """Forget the machines that could verify nothing: a checkpoint has been verified here."""
        self._change(lambda head: replace(head, unverified_by=()) if head.unverified_by else head)

    def abandon(self, name: str) -> None:
        """Mark a checkpoint's files for deletion: as far as its writer knows, it was not published.

        They are deleted after the next publication: until then an unanswered write may name them.
        """
        self._abandoned.add(name)
        self.delete_if_lost()

    def delete_if_lost(self) -> None:
        """Delete what was abandoned if the lease is lost: there may be no take-over to sweep it.

        A save may fail because a successor has swept it, before anything shows it. What the head
        names stays: the commit may have succeeded, its answer lost, and a successor resumed from
        it. If no head names it by now, none ever will: a late write of ours is refused.
        """
        while self.lost.is_set() and self._abandoned:
            name = self._abandoned.pop()
            with suppress(StoreError, UserError):
                head = Head.read(self._store)
                if head is not None and all(entry.name != name for entry in head.checkpoints):
                    self._store.delete_below(checkpoint_prefix(name))

    def put(self, key: str, data: bytes) -> None:
        """Write another object of the run; what a successor has written is never replaced.

        A successor that wrote before the key was read is found when the lease is renewed, and one
        that writes later changes the key, so that the store refuses this write.
        """
        for _ in range(_PUT_ATTEMPTS):
            before = self._store.get(key)
            self.beat()
            if put_unless_changed(self._store, key, data, before.etag if before else None):
                return
        raise StoreError(f"{self._store.uri}/{key} changes faster than it can be written")

    def delete_unkept(self) -> None:
        """Delete the files of checkpoints dropped by a publication; nothing waits for it.

        After a release the successor deletes them, because then seconds count.
        """
        with self._deleting:
            self._unkept -= self._delete(self._unkept)

    def sweep(self) -> None:
        """Delete unfinished files, and checkpoints of earlier generations that no head names.

        Never those of this or a later generation: a successor that this writer does not know of
        yet may have published them.
        """
        named = {entry.name for entry in self._head.checkpoints}
        try:
            self._store.sweep("")
            unnamed = self._store.folders(CHECKPOINTS) - named
        except StoreError as error:
            _log.warning(f"[sweep] {error}; the next take-over sweeps")
            return
        generation = self._head.generation
        self._delete({name for name in unnamed if 0 < generation_in(name) < generation})

    def release(self) -> None:
        """Let the next candidate take over at once; no-op once the run has ended."""
        self._stop.set()
        if not self.lost.is_set():
            self._change(Head.released)

    def finish(self, weights_sha256: str | None) -> None:
        """Mark the run finished."""
        self.delete_unkept()  # now or never: there is no successor
        self._change(lambda head: replace(head, state="finished", weights_sha256=weights_sha256))
        self._stop.set()

    def fail(self, reason: str) -> None:
        """Mark the run failed."""
        self._change(lambda head: replace(head, state="failed", reason=reason))
        self._stop.set()

    def close(self) -> None:
        """Stop the heartbeat thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1)

    def beat(self) -> None:
        """Renew the lease once."""
        self._change(Head.renewed)

    def _beat(self) -> None:
        while not self._stop.wait(self._ttl_seconds / 3):
            try:
                self.beat()
            except LeaseLostError:
                return  # the loop sees `lost` at its next step boundary
            except Exception as error:  # the thread of a lease that is held does not die
                _log.warning(f"[heartbeat] {error}; retrying")

    def _delete(self, names: set[str]) -> set[str]:
        """Delete the files of checkpoints; return the names of those that are gone."""
        deleted = set()
        for name in sorted(names):
            try:
                self._store.delete_below(checkpoint_prefix(name))
                deleted.add(name)
            except StoreError as error:
                # Published checkpoints are safe; the next publication or take-over retries.
                _log.warning(f"[retention] {error}; retrying")
        return deleted

    def _change(self, change: Callable[[Head], Head]) -> tuple[Head, Head]:
        """Write the changed head; return the head before and after."""
        with self._lock:
            while True:
                self.check()
                before, after = self._head, change(self._head)
                if after is before:
                    return before, before
                after = replace(after, nonce=new_nonce())
                try:
                    self._etag = after.write(self._store, self._etag)
                except PreconditionFailedError as error:
                    self._adopt(error)
                    continue  # the head was ours: an earlier write without a response
                except StoreError:
                    self._unanswered.add(after.nonce)
                    raise
                self._head = after
                self._unanswered.clear()
                return before, after

    def _adopt(self, error: PreconditionFailedError) -> None:
        """Continue from the current head if this lease wrote it; otherwise the lease is lost."""
        head, etag = Head.find(self._store)
        if not head or head.nonce not in self._unanswered or head.is_ended:
            raise self._lose() from error
        kept = {entry.name for entry in head.checkpoints}
        self._unkept |= {each.name for each in self._head.checkpoints} - kept
        self._head, self._etag = head, etag

    def _lose(self) -> LeaseLostError:
        self.lost.set()
        return LeaseLostError(f"{self._store.uri} was taken over by another writer")


def acquire(
    store: Store,
    run_id: str,
    writer: str,
    ttl_seconds: float,
    wait: Callable[[float], bool],
    waiting: Callable[[str], None],
) -> "Lease | Head":
    """Take over the run; return the head instead if the run has finished or failed.

    A candidate takes over at once if the head is released, else once its ETag has not changed for
    one TTL by this machine's own monotonic clock. `wait(seconds)` returns whether a notice came.
    """
    seen: str | None = None
    announced_generation = 0
    since = time.monotonic()
    while True:
        head, etag = Head.find(store)
        if head and head.is_ended:
            return head
        if head and etag != seen:
            seen, since = etag, time.monotonic()
            if head.state == "running":
                waiting(head.writer)
                if head.generation != announced_generation:
                    announce_waiting(store, head.generation, writer)
                    announced_generation = head.generation
        is_free = not head or head.state == "released" or time.monotonic() - since >= ttl_seconds
        if is_free:
            base = head or _first_head(store, run_id, writer)
            mine = replace(
                base,
                generation=base.generation + 1,
                writer=writer,
                nonce=new_nonce(),
                state="running",
            )
            try:
                return Lease(store, mine, etag, ttl_seconds)
            except LeaseLostError:
                continue  # another candidate was faster; wait for it as for any other holder
        if wait(min(1.0, ttl_seconds / 10)):
            raise InterruptedRunError(f"a notice came while waiting for {store.uri}")


_POLL_SECONDS = 1.0
# How often to try to mark a run failed between a holder's heartbeats.
_MARKS = 60


def _first_head(store: Store, run_id: str, writer: str) -> Head:
    """Return a head for a run without one; UserError if it is gone, and named checkpoints.

    Of one that was deleted before the first commit, generations that wrote are not used again.
    """
    if Head.read(store) is None and store.sizes(CHECKPOINTS) and Head.read(store) is None:
        raise UserError(
            f"{store.uri} has checkpoints but no {HEAD}; restore its last version, "
            "or use another run URI"
        )
    used = sum(key.endswith("-take-over.json") for key in store.sizes(EVENTS))
    return Head(run_id=run_id, generation=used, writer=writer, nonce="")


def mark_failed(store: Store, run_id: str, writer: str, reason: str) -> Head:
    """Mark a run failed without holding its lease; a finished run stays finished."""
    for _ in range(_MARKS):
        head, etag = Head.find(store)
        if head and head.is_ended:
            return head
        base = head or _first_head(store, run_id, writer)
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
        """The checkpoint that the next attempt resumes from, if it is undamaged."""
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
                f"{store.uri} is held by {head.writer}, which is alive: first runs stop"
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
