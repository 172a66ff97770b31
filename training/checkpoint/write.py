"""One save: state to files to the store to the head, in this thread or in one of its own."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from contract.keys import checkpoint_prefix
from training.checkpoint.budget import Cost
from training.checkpoint.read import refuse_nan
from training.checkpoint.sharded import merged
from training.checkpoint.sharded_leader import ShardedLeader, refuse_wrong_sizes
from training.checkpoint.slices import SLICES
from training.checkpoint.state import Contents, HostCopy, state_file
from training.checkpoint.transfer import CancelledError, Progress, send
from training.errors import UserError
from training.interruption.notice import Notice
from training.ranks.context import Attempt
from training.record.checkpoint_entry import CheckpointEntry, FileEntry, Kind
from training.record.head import read_head
from training.record.lease import LeaseLostError
from training.record.position import Position
from training.store.protocol import StoreError

Tensors: TypeAlias = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a save is for that answers a notice."""

    notice: Notice
    releases: bool  # the lease, in the write that publishes


class Save:
    """A save of one boundary, which is published once and never after it was cancelled."""

    def __init__(
        self,
        attempt: Attempt,
        name: str,
        position: Position,
        epoch: int,
        kind: Kind,
        files: Sequence[Contents],
        state: Mapping[str, Any],
        tensors: Tensors,
        device: torch.device,
        image: HostCopy | None = None,
        *,
        crew: ShardedLeader | None = None,
        answered: Position | None = None,
    ) -> None:
        self.name = name
        self.position = position
        self.kind: Kind = kind
        self.image = image
        self.device = device
        self.error: BaseException | None = None
        self.cost: Cost | None = None
        self.blocked_seconds = 0.0
        self.began = time.monotonic()
        self.answer: Answer | None = None
        self._attempt = attempt
        self._epoch = epoch
        self._state = state
        self._answered = answered  # committed at a notice, after which training went on
        self._crew = crew  # the other ranks write the rest
        # The state of a sharded save is written once the others have said what they wrote.
        self._contents = [*files, state_file(state)] if crew is None else [*files]
        self._tensors = tensors
        self._progress = Progress()
        self._lock = threading.Lock()
        self._is_publishing = False
        self._over = threading.Event()

    @property
    def prefix(self) -> str:
        """Of the files' keys."""
        return checkpoint_prefix(self.name)

    @property
    def num_bytes(self) -> int:
        """Of all files that this process writes."""
        return sum(file.size for file in self._contents)

    @property
    def is_over(self) -> bool:
        """Whether it was committed, or has failed, or was cancelled."""
        return self._over.is_set()

    @property
    def is_committed(self) -> bool:
        """Whether the head names it."""
        return self.is_over and self.error is None

    @property
    def releases(self) -> bool:
        """Whether the write that publishes also lets go of the lease."""
        return self.answer is not None and self.answer.releases

    def seconds_left(self, expected: float) -> float:
        """What it still needs at its rate so far, or by what it was expected to take in all."""
        spent, done = time.monotonic() - self.began, self._progress.done_bytes
        if not done:
            return max(0.0, expected - spent)
        return spent * max(0, self.num_bytes - done) / done

    def start(self) -> None:
        """Run in a thread that may be left behind: a connection that hangs must not hold us."""
        threading.Thread(target=self.run, name="save", daemon=True).start()

    def run(self) -> None:
        """Save; what goes wrong is kept in `error`, for whoever asks next."""
        try:
            self._commit()
        except BaseException as error:  # whatever it is, the training thread must hear of it
            self.error = error
        finally:
            self._over.set()
        if self.is_committed and not self.releases:
            self._attempt.lease.delete_unkept()
        if isinstance(self.error, StoreError):
            # After the end: the store may be slow to take this too, and nobody waits for it.
            self._attempt.events.emit(
                "save-failed",
                "failed",
                step=self.position.step,
                kind=self.kind,
                message=str(self.error),
            )

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is over, at most so long; whether it is."""
        return self._over.wait(seconds)

    def cancel(self) -> bool:
        """Let it never be published; False if that is too late."""
        with self._lock:
            if self._is_publishing:
                return False
            self._progress.stop.set()
            return True

    def _commit(self) -> None:
        attempt = self._attempt
        sent = time.monotonic()
        try:
            self._publish(self._send())
        except StoreError:
            attempt.lease.abandon(self.name)
            raise
        except (LeaseLostError, CancelledError):
            if attempt.lease.lost.is_set():
                self._delete()
            raise
        self.cost = Cost(
            bytes=self.num_bytes,
            save_seconds=sent - self.began,
            upload_seconds=time.monotonic() - sent,
        )
        self._tell(self.cost.durable_seconds)

    def _publish(self, entry: CheckpointEntry) -> None:
        attempt = self._attempt
        with self._lock:
            if self._progress.stop.is_set():
                raise CancelledError("the save was cancelled")
            self._is_publishing = True
        attempt.lease.publish(entry, retention=attempt.retention, release=self.releases)

    def _delete(self) -> None:
        """The lease is lost, and no later take-over may come to sweep what this save has left.

        Unless the head names it: a write that was done and never answered is one that a successor
        took over from. What no head names by now none will: a late write of ours is refused.
        """
        store = self._attempt.store
        with suppress(StoreError, UserError):
            head = read_head(store)
            if head is not None and all(entry.name != self.name for entry in head.checkpoints):
                store.delete_below(checkpoint_prefix(self.name))

    def _tell(self, seconds: float) -> None:
        """Leave the event, here and not in the training thread: it is a request to the store."""
        extra: dict[str, float] = {}
        if self._answered is not None:
            extra = {"gained_steps": self.position.step - self._answered.step}
        elif self.answer is not None:
            since = time.monotonic() - self.answer.notice.received
            extra = {"notice_to_commit_seconds": round(since, 4)}
        self._attempt.events.emit(
            "committed",
            "ok",
            step=self.position.step,
            kind=self.kind,
            seconds=round(seconds, 4),
            **extra,
        )

    def _refuse_nan(self) -> None:
        position = self.position
        refuse_nan(self._tensors, f"stage {position.stage!r}, step {position.step}")

    def _send(self) -> CheckpointEntry:
        position = self.position
        return CheckpointEntry(
            name=self.name,
            step=position.step,
            stage=position.stage,
            epoch=self._epoch,
            kind=self.kind,
            files=self._send_files(),
            is_best=position.best.get("step") == position.step,
        )

    def _send_files(self) -> tuple[FileEntry, ...]:
        attempt = self._attempt
        mine = send(
            attempt.store,
            self.prefix,
            self._contents,
            self.device,
            self._progress,
            # Before the head names this step, the store has the records of every step up to it.
            beside=[self._refuse_nan, attempt.metrics.flush],
        )
        if self._crew is None:
            return mine
        others = self._crew.wait_for(self.name, self._progress.stop)
        files = (*mine, *(file for written in others for file in written.files))
        refuse_wrong_sizes(attempt.store.sizes(self.prefix), self.prefix, files)
        slices = merged([self._state[SLICES], *(o.slices for o in others if o.slices)])
        text = state_file({**self._state, SLICES: slices})
        return files + send(attempt.store, self.prefix, [text], self.device, self._progress)
