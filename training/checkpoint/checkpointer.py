"""Commits: a boundary's state becomes files in the store, and the head names them last.

What was committed before stays whole until the head's one write, whatever happens in between. One
save is under way at a time: the copy to the host holds training up, the rest runs behind it. A save
that the store refuses is tried again while training goes on; the end of a stage must be kept.
"""

import threading
import time
from dataclasses import asdict, replace

from training.checkpoint.budget import Budget, Cost, Estimate, draw_up, estimate, reserve_of
from training.checkpoint.host_copies import HostCopies
from training.checkpoint.read import checkpoint_name
from training.checkpoint.schedule import Schedule
from training.checkpoint.sharded_leader import ShardedLeader, Verb
from training.checkpoint.state import HostCopy, LiveState, live_files
from training.checkpoint.write import Answer, Save
from training.errors import RunFailedError
from training.interruption.notice import Notice
from training.ranks.context import Attempt
from training.record.checkpoint_entry import Kind
from training.record.lease import LeaseLostError
from training.record.position import Position
from training.store.protocol import StoreError

# In a checkpoint's JSON: how long the run had trained.
SPENT_SECONDS = "spent_seconds"
# A save under way when the time is over already gets so long: it is all that can still be kept.
_GRACE_SECONDS = 2.0
# A save under way when an attempt ends by itself is waited for so long,
_CLOSE_SECONDS = 60.0
# and one that a lost lease ended, to delete what it had uploaded.
_TIDY_SECONDS = 10.0
# Periodic commits are told of at most so often.
_SAY_SECONDS = 5.0


class Saver:
    """Commits captures, in the background where the host can hold a copy."""

    def __init__(
        self,
        attempt: Attempt,
        committed: Position | None,
        *,
        spent_seconds: float = 0.0,
    ) -> None:
        self.last_cost: Cost | None = None
        self._schedule = Schedule(
            attempt.interval,
            committed.best if committed else {},
            spent_seconds=spent_seconds,
            interruptions=attempt.generation - 1,
        )
        self._attempt = attempt
        self._committed = committed
        self._said = -_SAY_SECONDS  # when a line last told of a commit
        self._save: Save | None = None
        self._images = HostCopies()
        self._crew: ShardedLeader | None = None
        self._staged: Save | None = None
        self._lock = threading.Lock()  # of the staged copy and the end
        self._answered: Position | None = None  # committed at a notice, and training went on
        self._end_result: bool | None = None

    def share_with(self, crew: ShardedLeader | None, num_copiers: int = 1) -> None:
        """From here on the others of a crew write their shares (None: there is nothing to share).

        So many processes of this machine copy theirs at the same moment.
        """
        self._crew = crew
        self._images = HostCopies(num_copiers)

    def holds(self, position: Position) -> bool:
        """Whether nothing changed since the last commit (the start of a stage is derived anew)."""
        return position.stage_step == 0 or position == self._committed

    def is_due(self, position: Position, steps_per_epoch: int) -> bool:
        """Whether this boundary is to be saved."""
        return self._schedule.is_due(position, steps_per_epoch, is_saving=self.is_saving)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, or is over and not polled."""
        return self._save is not None

    def wait(self, seconds: float) -> bool:
        """Until the save under way is over, at most so long; whether it is."""
        return self._save is None or self._save.wait(seconds)

    def poll(self) -> None:
        """Take notice of the save under way, if it is over. Costs nothing; call it often.

        What the store refused is said, and raised only when it has done so for long; all else that
        the save has met is raised.
        """
        if self._save is not None and self._save.is_over:
            self._collect()

    def commit(self, capture: LiveState, position: Position, epoch: int, kind: Kind) -> None:
        """Commit synchronously, straight from the live tensors; refuses weights with a NaN.

        If the store fails at the end of a stage, that is raised: what comes next is read back.
        """
        self._finish()
        self._schedule.begin_unasked()
        save = self._live(capture, position, epoch, kind, self._name(position))
        self._order("live", save.name)
        self._run(save)

    def _run(self, save: Save) -> None:
        self._save = save
        save.run()
        save.blocked_seconds = time.monotonic() - save.began
        self._collect()
        with self._lock:
            self._staged = None  # older than what is committed

    def begin(self, capture: LiveState, position: Position, epoch: int) -> None:
        """Commit behind the training, which goes on once the state is copied to the host.

        A save that is still under way is waited for. Where the host cannot hold a copy, the state
        is streamed from the device and committed before this returns.
        """
        asked = time.monotonic()
        is_best = position.best.get("step") == position.step
        kind: Kind = "best" if is_best else "periodic"
        self._schedule.begin(position)
        self._finish()
        began, name = time.monotonic(), self._name(position)
        self._order("copy", name)
        image = self._copy(capture)
        if image is None:
            print("[save] memory cannot hold a copy of the state; streaming it", flush=True)
            self._run(self._live(capture, position, epoch, kind, name))
            return
        save = self._of(image, capture, position, epoch, kind, name)
        save.began = began
        save.blocked_seconds = time.monotonic() - asked
        self._save = save
        save.start()

    def stage(self, capture: LiveState, position: Position, epoch: int) -> bool:
        """Keep a copy of a boundary for `emergency_staged`; False where memory cannot hold it."""
        if self.holds(position) or (self._save is not None and self._save.position == position):
            return True
        name = self._name(position)
        self._order("stage", name)
        image = self._copy(capture)
        everywhere = self._crew is None or self._crew.have_staged(image is not None)
        if image is None or not everywhere:
            return False
        with self._lock:
            self._staged = self._of(image, capture, position, epoch, "emergency", name)
        return True

    def emergency(self, capture: LiveState, position: Position, epoch: int, notice: Notice) -> bool:
        """Commit and release in one write within the notice; return whether the state is safe.

        If the time does not suffice, the previous checkpoint stays the newest and the lease is
        released, so that the successor need not wait.
        """
        with self._lock:
            if self._end_result is None:
                name = self._name(position)
                save = self._live(capture, position, epoch, "emergency", name)
                self._end_result = self._end(save, notice)
                if not self._end_result:
                    self._order("drop", name)
            return self._end_result

    def commit_at_notice(
        self, capture: LiveState, position: Position, epoch: int, notice: Notice
    ) -> bool:
        """As `emergency`, but without the release; whether training may go on from this boundary.

        It may not where time, or the store, let nothing be committed, or only what is older.
        """
        with self._lock:
            self._staged = None  # older than what is committed
            name = self._name(position)
            save = self._live(capture, position, epoch, "emergency", name)
            self._end(save, notice, releases=False)
            if self.holds(position):
                self._answered = position
            else:
                self._order("drop", name)
            return self._answered is not None

    def expected(self, capture: LiveState, position: Position) -> Estimate:
        """What a commit of this boundary will take."""
        save = self._live(capture, position, 0, "emergency", self._name(position))
        return estimate(save.num_bytes, self.last_cost)

    def emergency_staged(self, notice: Notice) -> bool:
        """The same with the staged copy, from any thread: for when no boundary comes in time."""
        with self._lock:
            if self._end_result is None:
                self._end_result = self._end(self._staged, notice)
            return self._end_result

    def must_begin_by(self, notice: Notice) -> float:
        """The monotonic time after which `emergency_staged` would no longer fit the notice."""
        size = self._staged.num_bytes if self._staged else 0
        return notice.deadline - estimate(size, self.last_cost).seconds - reserve_of(notice)

    def close(self) -> None:
        """Finish the save under way, whose boundary was good; a lost lease publishes nothing."""
        save, self._save = self._save, None
        if save is None:
            return
        if self._attempt.lease.lost.is_set():
            save.cancel()
            save.wait(_TIDY_SECONDS)
        elif not save.wait(_CLOSE_SECONDS):
            save.cancel()
        else:
            self._settle(save)

    def _stamped(self, capture: LiveState) -> LiveState:
        """With what the next attempt's saver goes by."""
        spent = round(self._schedule.spent_seconds, 3)
        return replace(capture, state={**capture.state, SPENT_SECONDS: spent})

    def _name(self, position: Position) -> str:
        return checkpoint_name(position.step, self._attempt.generation)

    def _order(self, verb: Verb, name: str) -> None:
        """What the other ranks of a sharded stage do with their shares of a save."""
        if self._crew is not None:
            self._crew.order(verb, name)

    def _live(
        self, capture: LiveState, position: Position, epoch: int, kind: Kind, name: str
    ) -> Save:
        stamped = self._stamped(capture)
        parts = (self._attempt, name, position, epoch, kind)
        where = (live_files(stamped), stamped.state, capture.tensors, capture.device)
        return Save(*parts, *where, crew=self._crew, answered=self._answered)

    def _of(
        self,
        image: HostCopy,
        capture: LiveState,
        position: Position,
        epoch: int,
        kind: Kind,
        name: str,
    ) -> Save:
        parts = (self._attempt, name, position, epoch, kind)
        where = (image.files, image.state, image.tensors, capture.device, image)
        return Save(*parts, *where, crew=self._crew, answered=self._answered)

    def _copy(self, capture: LiveState) -> HostCopy | None:
        """Copy to the host; None where memory cannot hold it beside what is still being sent."""
        with self._lock:
            self._staged = None  # superseded, and its memory may be needed
        return self._images.copy(self._stamped(capture), self._save.image if self._save else None)

    def _finish(self) -> None:
        """Wait for the save under way, then as `poll`."""
        if self._save is not None:
            self._save.wait()
            self._collect()

    def _collect(self) -> None:
        save, self._save = self._save, None
        assert save is not None
        if save.error is None:
            self._record(save)
            return
        self._order("drop", save.name)
        if not isinstance(save.error, StoreError) or save.kind == "stage-end":
            raise save.error
        failed = self._schedule.failed
        failed.count(save.began)
        if failed.is_hopeless:
            raise save.error
        print(
            f"[save] step {save.position.step} was not saved, {failed.in_a_row} in a row: "
            f"{save.error}; the last commit stays, training goes on, it is tried again",
            flush=True,
        )

    def _settle(self, save: Save) -> bool:
        """Record a save that is over at the end of an attempt; whether it was committed."""
        if isinstance(save.error, RunFailedError | LeaseLostError):
            raise save.error
        if save.error is not None:
            print(f"[save] failed: {save.error}; the last commit stays", flush=True)
            return False
        self._record(save)
        return True

    def _record(self, save: Save) -> None:
        assert save.cost is not None
        self._committed = save.position
        self.last_cost, step = save.cost, save.position.step
        durable = save.cost.durable_seconds
        self._attempt.metrics.write(
            "commit",
            step=step,
            checkpoint_kind=save.kind,
            seconds=round(durable, 4),
            blocked_seconds=round(save.blocked_seconds, 4),
            bytes=save.cost.bytes,
        )
        self._tell(save, save.cost)
        # On a CPU what runs behind the training runs on its cores.
        cost = save.blocked_seconds if save.device.type == "cuda" else durable
        if (choice := self._schedule.measure(cost, durable)) is not None:
            print(f"[interval] auto: {choice}", flush=True)
            self._attempt.metrics.write("interval", step=step, **asdict(choice))

    def _tell(self, save: Save, cost: Cost) -> None:
        """A line for people; of those that come by the clockwork not each."""
        now = time.monotonic()
        if save.kind == "periodic" and now - self._said < _SAY_SECONDS:
            return
        self._said = now
        size, durable = cost.bytes / 1e6, cost.durable_seconds
        print(
            f"[checkpoint] step {save.position.step}, {save.kind}: {size:.1f} MB committed "
            f"in {durable:.2f} s",
            flush=True,
        )

    def _end(self, save: Save | None, notice: Notice, *, releases: bool = True) -> bool:
        """What there is to do at a notice, by the arithmetic."""
        answer = Answer(notice=notice, releases=releases)
        under_way, self._save = self._save, None
        if under_way is not None and under_way.is_over:
            self._settle(under_way)
            under_way = None
        if under_way is not None and (save is None or under_way.position == save.position):
            print("[emergency] this state is being saved already; finishing that", flush=True)
            if self._end_with(under_way, answer) or save is None:
                return under_way.is_committed
            under_way = None  # it failed: once more, if there is time
        if save is None or self.holds(save.position):
            then = "only releasing" if releases else "nothing to save"
            print(f"[emergency] nothing changed since the last commit; {then}", flush=True)
            return True
        expected = estimate(save.num_bytes, self.last_cost)
        finish = under_way.seconds_left(expected.seconds) if under_way else None
        budget = draw_up(save.num_bytes, expected, notice, time.monotonic(), finish)
        print(f"[emergency] {budget}", flush=True)
        if budget.plan == "give up":
            print("[emergency] not enough time; the last commit stays", flush=True)
            if under_way is not None:
                self._await(under_way, _GRACE_SECONDS)
            return False
        if under_way is not None and budget.plan == "finish":
            print("[emergency] too short for this step; finishing the save before it", flush=True)
            return self._end_with(under_way, answer)
        if under_way is not None:
            self._make_way(under_way, budget)
        if save is not self._staged:
            self._order("live", save.name)
        elif self._crew is not None:
            self._crew.write_staged(save.name)
        save.answer, save.began = answer, time.monotonic()
        save.start()
        return self._end_with(save, answer)

    def _make_way(self, under_way: Save, budget: Budget) -> None:
        """Let the older save finish where the time is enough for both, else give it up."""
        if budget.plan != "finish, then save" and under_way.cancel():
            print("[emergency] the save under way is given up for this one", flush=True)
        else:
            self._await(under_way, budget.seconds_left - budget.need_seconds)

    def _await(self, under_way: Save, seconds: float) -> None:
        """Let a save finish if it does so soon; else it is never published."""
        if under_way.wait(max(0.0, seconds)) or not under_way.cancel():
            under_way.wait()  # what cannot be cancelled is writing the head, which is bounded
            self._settle(under_way)

    def _end_with(self, save: Save, answer: Answer) -> bool:
        save.answer, notice = answer, answer.notice
        patience = max(0.0, notice.seconds_left - reserve_of(notice))
        if save.kind != "emergency":
            patience = max(patience, _GRACE_SECONDS)
        if not save.wait(patience) and save.cancel():
            print("[emergency] the upload was too slow; the last commit stays", flush=True)
            return False
        save.wait()  # the head is being written, which is bounded
        return self._settle(save)
