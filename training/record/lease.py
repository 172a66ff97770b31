"""The lease on a run: the right to write its state, held by one writer at a time.

Every change is one conditional write of head.json, so the store itself refuses a stale writer. No
two machines' clocks are compared, and safety never depends on the TTL. Imports no torch.
"""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from contract.keys import CHECKPOINTS, HEAD, checkpoint_prefix
from training.errors import UserError
from training.record.candidates import say_waiting
from training.record.checkpoint_entry import CheckpointEntry
from training.record.head import Head, State, new_nonce, parse_head, read_head, write_head
from training.record.retention import KEEP_NEWEST, Retention
from training.store.protocol import PreconditionFailedError, Store, StoreError

# In a checkpoint's name (training/checkpoint/read.py).
_GENERATION = re.compile(r"-g([0-9]+)-")


class LeaseLostError(RuntimeError):
    """Another writer has taken the run over; nothing more may be written."""


class InterruptedWhileWaitingError(RuntimeError):
    """A notice came while this candidate waited for the lease."""


class Lease:
    """The right to write a run's state, from `acquire`; any method may raise LeaseLostError."""

    def __init__(self, store: Store, head: Head, etag: str | None, ttl_seconds: float) -> None:
        self.lost = threading.Event()
        self._store = store
        self._head = head
        # Nonces of writes that nobody answered: one that turns up later was ours all the same.
        self._unanswered: set[str] = set()
        self._abandoned: set[str] = set()  # checkpoints that were not published
        self._unkept: set[str] = set()  # those that no head will name again
        self._ttl_seconds = ttl_seconds
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._deleting = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._etag = write_head(store, head, etag)
        except PreconditionFailedError as error:
            raise self._lose() from error

    @property
    def head(self) -> Head:
        """As last written by this lease."""
        return self._head

    def check(self) -> None:
        """Raise LeaseLostError if a write found another writer."""
        if self.lost.is_set():
            raise self._lose()

    def start_heartbeat(self) -> None:
        """Show every third of a TTL that this writer lives."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def publish(
        self, entry: CheckpointEntry, *, retention: Retention = KEEP_NEWEST, release: bool = False
    ) -> None:
        """Commit a checkpoint whose files lie in the store; name no more what is not to be kept."""
        with self._publishing:
            self.check()
            assert self._head.state == "running", "a run that was let go of is not written to"
            state: State = "released" if release else "running"

            def publish(head: Head) -> Head:
                kept = retention.kept((*head.checkpoints, entry))
                return replace(head, checkpoints=kept, state=state)

            before, after = self._change(publish)
            abandoned = set(self._abandoned)
            self._abandoned -= abandoned
            names = {known.name for known in (*before.checkpoints, entry)} | abandoned
            self._unkept |= names - {kept.name for kept in after.checkpoints}
        if release:
            self._stop.set()

    def abandon(self, name: str) -> None:
        """Let a checkpoint's files go that was not published, as far as its writer knows.

        Only behind the next publication: until then a write that nobody answered may yet name it.
        """
        self._abandoned.add(name)

    def delete_unkept(self) -> None:
        """Delete the files of what a publication has ceased to name; nobody need wait for it.

        After a release the successor sweeps: seconds count then.
        """
        with self._deleting:
            try:
                for name in sorted(self._unkept):
                    self._store.delete_below(checkpoint_prefix(name))
                    self._unkept.discard(name)
            except StoreError as error:
                # What was published is safe; the rest goes after the next publication or take-over.
                print(f"[retention] {error}; trying again", flush=True)

    def sweep(self) -> None:
        """Delete checkpoints that no head names and whose writers this take-over has shut out.

        Never those of its own or a later generation: a successor of whom this writer has not heard
        yet may have published them.
        """
        named = {entry.name for entry in self._head.checkpoints}
        found = {key.split("/")[1] for key in self._store.sizes(CHECKPOINTS)}
        for name in sorted(found - named):
            match = _GENERATION.search(name)
            if match and int(match[1]) < self._head.generation:
                self._store.delete_below(checkpoint_prefix(name))

    def release(self) -> None:
        """Let the next candidate in at once; no-op after an end."""
        self._stop.set()
        if self._head.state == "running" and not self.lost.is_set():
            self._change(lambda head: replace(head, state="released"))

    def finish(self, weights_sha256: str) -> None:
        """The run is done."""
        self.delete_unkept()  # by now or never: nobody takes over
        self._change(lambda head: replace(head, state="finished", weights_sha256=weights_sha256))
        self._stop.set()

    def fail(self, reason: str) -> None:
        """The run cannot go on."""
        self._change(lambda head: replace(head, state="failed", reason=reason))
        self._stop.set()

    def close(self) -> None:
        """Stop the heartbeat thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1)

    def beat(self) -> None:
        """Show once that this writer lives."""
        self._change(
            lambda head: (
                replace(head, heartbeat=head.heartbeat + 1) if head.state == "running" else head
            )
        )

    def _beat(self) -> None:
        while not self._stop.wait(self._ttl_seconds / 3):
            try:
                self.beat()
            except LeaseLostError:
                return  # the loop sees `lost` at its next step boundary
            except StoreError as error:
                print(f"[heartbeat] {error}; trying again", flush=True)

    def _change(self, change: Callable[[Head], Head]) -> tuple[Head, Head]:
        """Write what `change` makes of the head; return the head before and after."""
        with self._lock:
            while True:
                self.check()
                before, after = self._head, change(self._head)
                if after is before:
                    return before, before
                after = replace(after, nonce=new_nonce())
                try:
                    self._etag = write_head(self._store, after, self._etag)
                except PreconditionFailedError as error:
                    self._adopt(error)
                    continue  # the head was ours: an earlier write that nobody had answered
                except StoreError:
                    self._unanswered.add(after.nonce)
                    raise
                self._head = after
                self._unanswered.clear()
                return before, after

    def _adopt(self, error: PreconditionFailedError) -> None:
        """Go on from the head as it stands if this lease wrote it, else the lease is lost."""
        found = self._store.get(HEAD)
        head = parse_head(self._store, found) if found else None
        if not found or not head or head.nonce not in self._unanswered or head.is_ended:
            raise self._lose() from error
        self._head, self._etag = head, found.etag

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
    """Take the run over; return the head instead when the run is finished or failed.

    A candidate takes over at once when the head says released, else when its tag stood still for
    one TTL of this machine's own monotonic clock. `wait(seconds)` returns whether a notice came.
    """
    if read_head(store) is None and store.sizes(CHECKPOINTS) and read_head(store) is None:
        # A run that begins would sweep what no head names.
        raise UserError(
            f"{store.uri} has checkpoints and no {HEAD}; put its last version back, "
            "or give another run URI"
        )
    seen: str | None = None
    told = 0
    since = time.monotonic()
    while True:
        found = store.get(HEAD)
        head = parse_head(store, found) if found else None
        if head and head.is_ended:
            return head
        if found and head and found.etag != seen:
            seen, since = found.etag, time.monotonic()
            if head.state == "running":
                waiting(head.writer)
                if head.generation != told:
                    say_waiting(store, head.generation, writer)
                    told = head.generation
        free = not head or head.state == "released" or time.monotonic() - since >= ttl_seconds
        if free:
            mine = (
                replace(
                    head,
                    generation=head.generation + 1,
                    writer=writer,
                    nonce=new_nonce(),
                    state="running",
                )
                if head
                else Head(run_id=run_id, generation=1, writer=writer, nonce=new_nonce())
            )
            try:
                return Lease(store, mine, found.etag if found else None, ttl_seconds)
            except LeaseLostError:
                continue  # another candidate was faster; watch it like any other holder
        if wait(min(1.0, ttl_seconds / 10)):
            raise InterruptedWhileWaitingError(f"a notice came while waiting for {store.uri}")
