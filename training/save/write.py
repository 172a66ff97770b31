"""One write of a checkpoint: files to the store, then the entry to the head, which commits it.

It runs in the thread of its caller or in one of its own. The head names a checkpoint once, and
never after its write was cancelled.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from contract.keys import checkpoint_prefix
from training.attempt.context import AttemptContext
from training.attempt.notice import Notice
from training.errors import UserError
from training.record.checkpoint_entry import CheckpointEntry, FileEntry, Kind
from training.record.head import read_head
from training.record.lease import LeaseLostError
from training.record.position import Position
from training.save.budget import Cost
from training.save.sharded import merged
from training.save.sharded_leader import ShardedLeader, refuse_wrong_sizes
from training.save.slices import SLICES
from training.save.state import HostCopy, LiveState, refuse_nan, state_file
from training.save.transfer import send
from training.store.parts import CancelledError, TransferProgress
from training.store.protocol import StoreError

Tensors: TypeAlias = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """What is to be saved, and why. The live state is good only until the next step starts."""

    name: str  # of the checkpoint
    kind: Kind
    position: Position
    epoch: int
    state: LiveState
    seconds_left: float | None = None  # of the stage, at the pace so far


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeSave:
    """What a save that answers a notice also does."""

    notice: Notice
    releases: bool  # the lease, in the same write of the head


class CheckpointWrite:
    """The write of one request, from its live state or from a copy of that on the host."""

    def __init__(
        self,
        context: AttemptContext,
        request: SaveRequest,
        source: LiveState | HostCopy,
        *,
        leader: ShardedLeader | None = None,
        since_notice: Position | None = None,
    ) -> None:
        self.request = request
        self.source = source
        self.error: BaseException | None = None
        self.cost: Cost | None = None
        self.blocked_seconds = 0.0
        self.began = time.monotonic()
        self.notice_save: NoticeSave | None = None
        self._context = context
        self._since_notice = since_notice  # committed at a notice, after which training continued
        self._leader = leader  # the other ranks write their shares
        # The JSON of a sharded checkpoint is written once the other ranks have announced theirs.
        self._files = [*source.files, *([] if leader else [state_file(source.state)])]
        self._progress = TransferProgress()
        self._lock = threading.Lock()
        self._is_publishing = False
        self._over = threading.Event()

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.request.name

    @property
    def position(self) -> Position:
        """The boundary that is saved."""
        return self.request.position

    @property
    def kind(self) -> Kind:
        """Why it is saved."""
        return self.request.kind

    @property
    def num_bytes(self) -> int:
        """Total bytes of the files that this process writes."""
        return sum(file.size for file in self._files)

    @property
    def is_over(self) -> bool:
        """Whether it was committed, has failed or was cancelled."""
        return self._over.is_set()

    @property
    def is_committed(self) -> bool:
        """Whether the head names the checkpoint."""
        return self.is_over and self.error is None

    @property
    def releases(self) -> bool:
        """Whether the write that commits also releases the lease."""
        return self.notice_save is not None and self.notice_save.releases

    def seconds_left(self, expected: float) -> float:
        """Remaining seconds at the rate so far; before the first byte, by the expected total."""
        spent, done = time.monotonic() - self.began, self._progress.done_bytes
        if not done:
            return max(0.0, expected - spent)
        return spent * max(0, self.num_bytes - done) / done

    def start(self) -> None:
        """Run in a daemon thread, so that a connection that hangs cannot keep the process alive."""
        threading.Thread(target=self.run, name="save", daemon=True).start()

    def run(self) -> None:
        """Write and commit; an error is kept in `error` for the caller's thread."""
        try:
            self._commit()
        except BaseException as error:  # whatever it is, the training thread must see it
            self.error = error
        finally:
            self._over.set()
        if self.is_committed and not self.releases:
            self._context.lease.delete_unkept()
        if isinstance(self.error, StoreError):
            # After `_over`: the store may be slow to take the event too, and nobody waits for it.
            self._context.events.emit(
                "save-failed",
                "failed",
                step=self.position.step,
                kind=self.kind,
                message=str(self.error),
            )

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, for up to `seconds`; return whether it is."""
        return self._over.wait(seconds)

    def cancel(self) -> bool:
        """Keep it from being committed; return False if it is too late for that."""
        with self._lock:
            if self._is_publishing:
                return False
            self._progress.stop.set()
            return True

    def _commit(self) -> None:
        context, sent = self._context, time.monotonic()
        try:
            self._publish(self._send())
        except StoreError:
            context.lease.abandon(self.name)
            raise
        except (LeaseLostError, CancelledError):
            if context.lease.lost.is_set():
                self._delete()
            raise
        self.cost = Cost(
            bytes=self.num_bytes,
            save_seconds=sent - self.began,
            upload_seconds=time.monotonic() - sent,
        )
        self._emit_committed(self.cost.durable_seconds)

    def _publish(self, files: tuple[FileEntry, ...]) -> None:
        position = self.position
        entry = CheckpointEntry(
            name=self.name,
            step=position.step,
            stage=position.stage,
            epoch=self.request.epoch,
            kind=self.kind,
            files=files,
            is_best=position.best.get("step") == position.step,
            seconds_left=self.request.seconds_left,
        )
        with self._lock:
            if self._progress.stop.is_set():
                raise CancelledError("the save was cancelled")
            self._is_publishing = True
        lease, retention = self._context.lease, self._context.retention
        lease.publish(entry, retention=retention, release=self.releases)

    def _send(self) -> tuple[FileEntry, ...]:
        context, prefix = self._context, checkpoint_prefix(self.name)
        # Before the head names this step, the store has the metrics of every step up to it.
        beside = [self._refuse_nan, context.metrics.flush]
        device, progress = self.source.device, self._progress
        mine = send(context.store, prefix, self._files, device, progress, beside=beside)
        if self._leader is None:
            return mine
        shares = self._leader.wait_for(self.name, progress.stop)
        files = (*mine, *(file for share in shares for file in share.files))
        refuse_wrong_sizes(context.store.sizes(prefix), prefix, files)
        slices = merged([self.source.state[SLICES], *(s.slices for s in shares if s.slices)])
        json_file = state_file({**self.source.state, SLICES: slices})
        return files + send(context.store, prefix, [json_file], device, progress)

    def _refuse_nan(self) -> None:
        position = self.position
        where = f"stage {position.stage!r}, step {position.step}"
        refuse_nan(self.source.tensors, position.step, where)

    def _delete(self) -> None:
        """Delete the files after a lost lease: no later take-over may come to sweep them.

        Not if the head names them: the commit may have been done, its answer lost, and a successor
        resumed from it. What no head names by now none will: a late write of ours is refused.
        """
        store = self._context.store
        with suppress(StoreError, UserError):
            head = read_head(store)
            if head is not None and all(entry.name != self.name for entry in head.checkpoints):
                store.delete_below(checkpoint_prefix(self.name))

    def _emit_committed(self, seconds: float) -> None:
        """Write the event here and not in the training thread: it is a request to the store."""
        extra: dict[str, Any] = {}
        if self._since_notice is not None:
            extra = {"gained_steps": self.position.step - self._since_notice.step}
        elif self.notice_save is not None:
            since = time.monotonic() - self.notice_save.notice.received
            extra = {"notice_to_commit_seconds": round(since, 4)}
        self._context.events.emit(
            "committed",
            "ok",
            step=self.position.step,
            kind=self.kind,
            seconds=round(seconds, 4),
            **extra,
        )
