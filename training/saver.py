"""Commits: a boundary's state becomes files in the store, and the head names them last.

What was committed before stays whole until the head's one write, whatever happens in between. One
save is under way at a time: the copy to the host holds training up, the rest runs behind it.
"""

import threading
import time

from training.budget import Cost, draw_up, reserve_of
from training.capture import Capture, Image, live_contents
from training.errors import RunFailedError
from training.head import Kind, LeaseLostError
from training.interruption import Notice
from training.memory import available_bytes
from training.position import Attempt, Position
from training.retention import KEEP_NEWEST, Retention
from training.save import Save

# What a copy of the state must leave to everything else on the machine.
_SPARE_BYTES = 512 * 1024 * 1024
# A save under way when an attempt ends by itself is waited for so long.
_CLOSE_SECONDS = 60.0


class Saver:
    """Commits captures, in the background where the host can hold a copy."""

    def __init__(
        self, attempt: Attempt, committed: Position | None, retention: Retention = KEEP_NEWEST
    ) -> None:
        self.last_cost: Cost | None = None
        self.last_commit = time.monotonic()
        self._attempt = attempt
        self._committed = committed
        self._retention = retention
        self._best = committed.best if committed else {}
        self._begun_step = -1
        self._save: Save | None = None
        self._images: list[Image] = []
        self._staged: Save | None = None
        self._lock = threading.Lock()  # of the staged copy and the end
        self._end_result: bool | None = None

    def holds(self, position: Position) -> bool:
        """Whether nothing changed since the last commit (the start of a stage is derived anew)."""
        return position.stage_step == 0 or position == self._committed

    def is_due(self, position: Position, steps_per_epoch: int) -> bool:
        """Whether this boundary is to be saved: the interval has passed, or it is the best so far.

        An interval of steps or epochs is kept to the step: `begin` waits for a save under way. One
        of seconds is put off to the first boundary after it.
        """
        if position.best.get("step") == position.step and position.best != self._best:
            return True
        if position.step == self._begun_step:
            return False
        interval = self._attempt.interval
        if interval.unit == "s":
            return self._save is None and time.monotonic() - self.last_commit >= interval.value
        if interval.unit == "steps":
            return position.step % interval.value == 0
        epochs, rest = divmod(position.stage_step, steps_per_epoch)
        return rest == 0 and epochs % interval.value == 0

    def poll(self) -> None:
        """Raise what the save under way has met, if it is over. Costs nothing; call it often."""
        if self._save is not None and self._save.is_over:
            self._collect()

    def commit(self, capture: Capture, position: Position, epoch: int, kind: Kind) -> None:
        """Commit synchronously, straight from the live tensors; refuses weights with a NaN."""
        self._finish()
        self._save = self._live(capture, position, epoch, kind)
        self._save.run()
        self._save.blocked_seconds = time.monotonic() - self._save.began
        self._collect()

    def begin(self, capture: Capture, position: Position, epoch: int) -> None:
        """Commit behind the training, which goes on once the state is copied to the host.

        A save that is still under way is waited for. Where the host cannot hold a copy, the state
        is streamed from the device and committed before this returns.
        """
        asked = time.monotonic()
        is_best = position.best.get("step") == position.step
        kind: Kind = "best" if is_best else "periodic"
        self._best, self._begun_step = position.best, position.step
        self._finish()
        began = time.monotonic()
        image = self._copy(capture)
        if image is None:
            print("[save] memory cannot hold a copy of the state; streaming it", flush=True)
            self.commit(capture, position, epoch, kind)
            return
        save = self._of(image, capture, position, epoch, kind)
        save.began = began
        save.blocked_seconds = time.monotonic() - asked
        self._save = save
        save.start()

    def stage(self, capture: Capture, position: Position, epoch: int) -> bool:
        """Keep a copy of a boundary for `emergency_staged`; False where memory cannot hold it."""
        if self.holds(position) or (self._save is not None and self._save.position == position):
            return True
        image = self._copy(capture)
        if image is None:
            return False
        with self._lock:
            self._staged = self._of(image, capture, position, epoch, "emergency")
        return True

    def emergency(self, capture: Capture, position: Position, epoch: int, notice: Notice) -> bool:
        """Commit and release in one write within the notice; return whether the state is safe.

        If the time does not suffice, the previous checkpoint stays the newest and the lease is
        released, so that the successor need not wait.
        """
        with self._lock:
            if self._end_result is None:
                save = self._live(capture, position, epoch, "emergency")
                self._end_result = self._end(save, notice)
            return self._end_result

    def emergency_staged(self, notice: Notice) -> bool:
        """The same with the staged copy, from any thread: for when no boundary comes in time."""
        with self._lock:
            if self._end_result is None:
                self._end_result = self._end(self._staged, notice)
            return self._end_result

    def must_begin_by(self, notice: Notice) -> float:
        """The monotonic time after which `emergency_staged` would no longer fit the notice."""
        size = self._staged.num_bytes if self._staged else 0
        return notice.deadline - draw_up(size, self.last_cost, notice, 0.0, None).need_seconds

    def close(self) -> None:
        """Finish the save under way, whose boundary was good; a lost lease publishes nothing."""
        save, self._save = self._save, None
        if save is None:
            return
        if self._attempt.lease.lost.is_set() or not save.wait(_CLOSE_SECONDS):
            save.cancel()
        else:
            self._settle(save)

    def _live(self, capture: Capture, position: Position, epoch: int, kind: Kind) -> Save:
        contents = live_contents(capture)
        parts = (self._attempt, self._retention, position, epoch, kind)
        return Save(*parts, contents, capture.tensors, capture.device)

    def _of(
        self, image: Image, capture: Capture, position: Position, epoch: int, kind: Kind
    ) -> Save:
        parts = (self._attempt, self._retention, position, epoch, kind)
        return Save(*parts, image.contents(), image.tensors, capture.device, image)

    def _copy(self, capture: Capture) -> Image | None:
        """Copy to the host; None where memory cannot hold it beside what is still being sent."""
        with self._lock:
            self._staged = None  # superseded, and its memory may be needed
        sending = self._save.image if self._save else None
        self._images = [i for i in self._images if i is sending or i.fits(capture)]
        image = next((i for i in self._images if i is not sending), None)
        if image is None:
            free = available_bytes()
            if free is not None and free - capture.num_bytes < _SPARE_BYTES:
                return None
            image = Image(capture)
            self._images.append(image)
        image.fill(capture)
        return image

    def _finish(self) -> None:
        """Wait for the save under way; raise what it met."""
        if self._save is not None:
            self._save.wait()
            self._collect()

    def _collect(self) -> None:
        save, self._save = self._save, None
        assert save is not None
        if save.error is not None:
            raise save.error
        self._record(save)

    def _settle(self, save: Save, since_notice: float | None = None) -> bool:
        """Record a save that is over at the end of an attempt; whether it was committed."""
        if isinstance(save.error, RunFailedError | LeaseLostError):
            raise save.error
        if save.error is not None:
            print(f"[save] failed: {save.error}; the last commit stays", flush=True)
            return False
        self._record(save, since_notice)
        return True

    def _record(self, save: Save, since_notice: float | None = None) -> None:
        assert save.cost is not None
        self._committed = save.position
        self.last_cost = save.cost
        self.last_commit = time.monotonic()
        seconds = round(save.cost.durable_seconds, 4)
        self._attempt.metrics.write(
            "commit",
            step=save.position.step,
            checkpoint_kind=save.kind,
            seconds=seconds,
            blocked_seconds=round(save.blocked_seconds, 4),
            bytes=save.cost.bytes,
        )
        extra = {} if since_notice is None else {"notice_to_commit_seconds": round(since_notice, 4)}
        self._attempt.events.emit(
            "committed", "ok", step=save.position.step, kind=save.kind, seconds=seconds, **extra
        )

    def _end(self, save: Save | None, notice: Notice) -> bool:
        """What there is to do at a notice, by the arithmetic."""
        under_way, self._save = self._save, None
        if under_way is not None and under_way.is_over:
            self._settle(under_way)
            under_way = None
        if under_way is not None and (save is None or under_way.position == save.position):
            print("[emergency] this state is being saved already; finishing that", flush=True)
            return self._end_with(under_way, notice)
        if save is None or self.holds(save.position):
            print("[emergency] nothing changed since the last commit; only releasing", flush=True)
            return True
        finish = under_way.seconds_left if under_way else None
        budget = draw_up(save.num_bytes, self.last_cost, notice, time.monotonic(), finish)
        print(f"[emergency] {budget}", flush=True)
        if budget.plan == "give up":
            print("[emergency] not enough time; the last commit stays", flush=True)
            return False
        if under_way is not None:
            if budget.plan == "finish":
                print("[emergency] too short for this step; finishing the save before", flush=True)
                return self._end_with(under_way, notice)
            if budget.plan == "finish, then save" or not under_way.cancel():
                if under_way.wait(notice.seconds_left / 2):
                    self._settle(under_way)
                else:
                    under_way.cancel()
        save.start()
        return self._end_with(save, notice)

    def _end_with(self, save: Save, notice: Notice) -> bool:
        save.releases = True
        if not save.wait(max(0.0, notice.seconds_left - reserve_of(notice))) and save.cancel():
            print("[emergency] the upload was too slow; the last commit stays", flush=True)
            return False
        save.wait()  # the head is being written, which is bounded
        return self._settle(save, time.monotonic() - notice.received)
