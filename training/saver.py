"""Commits: a snapshot becomes files, the files go to the store, and the head names them last.

What was committed before stays whole until the head's one write, whatever happens in between.
"""

import shutil
import threading
import time
from dataclasses import dataclass

from training.checkpoint import (
    Snapshot,
    checkpoint_name,
    has_nan,
    upload_files,
    write_files,
)
from training.errors import RunFailedError
from training.head import CheckpointEntry, FileEntry, Kind
from training.interruption import Notice
from training.position import Attempt, Position

# Before anything was measured on this machine: below what gp3 and S3 were seen to give.
_ASSUMED_SAVE_BYTES_PER_SECOND = 300e6
_ASSUMED_UPLOAD_BYTES_PER_SECOND = 50e6
# Kept for the head's write, the events and the end of the process.
_RESERVE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one commit on this machine."""

    bytes: int
    save_seconds: float
    upload_seconds: float


class Saver:
    """Commits snapshots and remembers what that costs here."""

    def __init__(self, attempt: Attempt, committed: Position | None) -> None:
        self.last_cost: Cost | None = None
        self.last_commit = time.monotonic()
        self._attempt = attempt
        self._committed = committed

    def holds(self, position: Position) -> bool:
        """Whether nothing changed since the last commit (the start of a stage is derived anew)."""
        return position.stage_step == 0 or position == self._committed

    def commit(self, snapshot: Snapshot, position: Position, epoch: int, kind: Kind) -> None:
        """Commit synchronously; refuses weights that hold a NaN."""
        began = time.monotonic()
        self._refuse_nan(snapshot, position)
        self._attempt.metrics.flush()
        entry = self._store_files(snapshot, position, epoch, kind)
        self._attempt.lease.publish(entry)
        self._after(position, kind, time.monotonic() - began)

    def emergency(self, snapshot: Snapshot, position: Position, epoch: int, notice: Notice) -> bool:
        """Commit and release in one write within the notice; return whether it was committed.

        If the time does not suffice, the previous checkpoint stays the newest and the lease is
        released, so that the successor need not wait.
        """
        began = time.monotonic()
        if not self._fits(snapshot, notice):
            return False
        self._refuse_nan(snapshot, position)
        entries: list[CheckpointEntry] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self._attempt.metrics.flush()
                entries.append(self._store_files(snapshot, position, epoch, "emergency"))
            except (OSError, RuntimeError) as error:
                errors.append(error)

        # In a thread that may be left behind: a slow upload must not cost the release.
        thread = threading.Thread(target=work, name="emergency", daemon=True)
        thread.start()
        thread.join(timeout=max(0.0, notice.seconds_left - _reserve(notice)))
        if errors:
            print(f"[emergency] the save failed: {errors[0]}; the last commit stays", flush=True)
            return False
        if not entries:
            print("[emergency] the upload was too slow; the last commit stays", flush=True)
            return False
        self._attempt.lease.publish(entries[0], release=True)
        committed = time.monotonic()
        self._after(position, "emergency", committed - began, committed - notice.received)
        return True

    def _fits(self, snapshot: Snapshot, notice: Notice) -> bool:
        size = sum(t.nbytes for part in snapshot.tensors.values() for t in part.values())
        cost = self.last_cost
        save = size / _ASSUMED_SAVE_BYTES_PER_SECOND
        upload = size / _ASSUMED_UPLOAD_BYTES_PER_SECOND
        if cost is not None:
            save = cost.save_seconds * size / cost.bytes
            upload = cost.upload_seconds * size / cost.bytes
        left = notice.seconds_left
        print(
            f"[emergency] {size / 1e6:.1f} MB: {save:.2f} s to save + {upload:.2f} s to upload "
            f"({'measured' if cost else 'assumed'}) + {_reserve(notice):.1f} s in reserve, "
            f"{left:.1f} s left",
            flush=True,
        )
        if left <= 0 or (cost is not None and save + upload + _reserve(notice) > left):
            print("[emergency] not enough time; the last commit stays", flush=True)
            return False
        return True

    def _refuse_nan(self, snapshot: Snapshot, position: Position) -> None:
        name = has_nan(snapshot.tensors["model"])
        if name is not None:
            raise RunFailedError(
                f"stage {position.stage!r}, step {position.step}: {name} holds a NaN; "
                "nothing was published, lower the learning rate or clip the gradients"
            )

    def _store_files(
        self, snapshot: Snapshot, position: Position, epoch: int, kind: Kind
    ) -> CheckpointEntry:
        began = time.monotonic()
        name = checkpoint_name(position.step, self._attempt.generation)
        folder = self._attempt.scratch / "checkpoints" / name
        try:
            files = write_files(snapshot, folder)
            written = time.monotonic()
            upload_files(self._attempt.store, name, folder, files)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.last_cost = Cost(
            bytes=_size(files),
            save_seconds=written - began,
            upload_seconds=time.monotonic() - written,
        )
        return CheckpointEntry(
            name=name, step=position.step, stage=position.stage, epoch=epoch, kind=kind, files=files
        )

    def _after(
        self, position: Position, kind: Kind, seconds: float, since_notice: float | None = None
    ) -> None:
        self._committed = position
        self.last_commit = time.monotonic()
        self._attempt.metrics.write(
            "commit",
            step=position.step,
            checkpoint_kind=kind,
            seconds=round(seconds, 4),
            bytes=self.last_cost.bytes if self.last_cost else 0,
        )
        notice = (
            {} if since_notice is None else {"notice_to_commit_seconds": round(since_notice, 4)}
        )
        self._attempt.events.emit(
            "committed", "ok", step=position.step, kind=kind, seconds=round(seconds, 4), **notice
        )


def _size(files: tuple[FileEntry, ...]) -> int:
    return sum(file.bytes for file in files)


def _reserve(notice: Notice) -> float:
    return min(_RESERVE_SECONDS, 0.1 * (notice.deadline - notice.received))
