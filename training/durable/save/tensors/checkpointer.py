"""Carries out saves, one at a time, in the background where the host can hold a copy.

The last commit stays intact until the head's one write, whatever happens in between. A save that
the store refuses is retried while training continues, except at the end of a stage.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from contract.keys import checkpoint_prefix
from training.durable.attempt.notice import Notice
from training.durable.attempt.world import AttemptContext
from training.durable.errors import DivergedError, RunFailedError
from training.durable.record.head import CheckpointEntry, Head, Position, checkpoint_name
from training.durable.record.lease import LeaseLostError
from training.durable.save.publish import CheckpointPublisher, Cost, Save
from training.durable.save.tensors.schedule import SPENT_SECONDS, SaveBudget, Schedule, estimate
from training.durable.save.tensors.sharded_saves import OtherShares, ShardedLeader, Verb
from training.durable.save.tensors.state import (
    SLICES,
    STATE,
    HostCopies,
    HostCopy,
    LiveState,
    send_state,
)
from training.durable.store.protocol import StoreError
from training.durable.store.transfer import FileEntry, put_text

_log = logging.getLogger(__name__)

# What a save under way gets when time has already run out: nothing else can still be kept.
_GRACE_SECONDS = 2.0
_PIECE_SECONDS = 0.5
# For how long a save may send nothing while training waits for it.
_HEADWAY_SECONDS = 20.0
# How long the end of an attempt waits for a save under way,
_CLOSE_SECONDS = 60.0
# and for one whose lease was lost, to delete what it uploaded.
_CLEANUP_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """A state to save, and why. The live state is valid only until the next step starts."""

    entry: CheckpointEntry  # the head's entry for it, without its files
    position: Position
    state: LiveState


class TensorSave(Save):
    """A save of what was requested, read from its live tensors or from a copy on the host."""

    def __init__(
        self,
        publisher: CheckpointPublisher,
        request: SaveRequest,
        state: LiveState | HostCopy,
        *,
        others: Callable[[str, threading.Event], OtherShares] | None = None,
        since_notice: Position | None = None,
    ) -> None:
        super().__init__()
        self.request = request
        self.state = state
        self.notice: Notice | None = None  # that the save answers
        self._publisher = publisher
        self._since_notice = since_notice  # committed at a notice, after which training continued
        self._others = others  # waits for what the other ranks write
        self._num_bytes = sum(file.size for file in state.files)

    @property
    def num_bytes(self) -> int:
        """Total bytes of the tensors that this process writes."""
        return self._num_bytes

    def entry_after(self, head: Head) -> CheckpointEntry:
        """The entry that the policy has requested."""
        return self.request.entry

    def send(self, name: str, tasks: Sequence[Callable[[], None]]) -> tuple[FileEntry, ...]:
        """Send the tensors (in a sharded stage those of all ranks), and then the JSON of all.

        Refuses weights with a NaN.
        """
        store, prefix, state = self._publisher.store, checkpoint_prefix(name), self.state.state
        position = self.request.position
        where = f"stage {position.stage!r}, step {position.step}"
        files = send_state(store, name, self.state, self.progress, where, tasks)
        if self._others is not None:
            theirs, slices = self._others(name, self.progress.stop)
            files = (*files, *theirs)
            there = store.sizes(prefix)
            for file in files:
                if (size := there.get(key := prefix + file.name, "no")) != file.bytes:
                    raise StoreError(f"{key} has {size} bytes instead of {file.bytes}")
            state = {**state, SLICES: _merged_slices([state[SLICES], *slices])}
        return (*files, put_text(store, prefix, STATE, json.dumps(state).encode()))

    def facts(self) -> Mapping[str, Any]:
        """Return what an answer to a notice, or the extra time after it, has gained."""
        if self._since_notice is not None:
            return {"gained_steps": self.request.position.step - self._since_notice.step}
        if self.notice is not None:
            since = time.monotonic() - self.notice.received
            return {"notice_to_commit_seconds": round(since, 4)}
        return {}

    def publish(self) -> None:
        """Send and commit it."""
        self._publisher.publish(self)

    def settle(self) -> None:
        """Report a refusal, or delete what is no longer kept."""
        self._publisher.settle(self)


def _merged_slices(slices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the slice lists of all ranks, which have the same tensors."""
    whole: dict[str, Any] = {}
    for part, tensors in slices[0].items():
        whole[part] = {}
        for name, about in tensors.items():
            found = [one for own in slices for one in own[part][name]["slices"]]
            whole[part][name] = {**about, "slices": found}
    return whole


class Checkpointer:
    """Saves what the policy requests; as a last resort another thread may save and end it."""

    def __init__(
        self,
        context: AttemptContext,
        committed: Position | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`committed` is where the run resumes, with the checkpoint's `state`."""
        self.schedule = Schedule(
            context.interval,
            committed.best if committed else {},
            spent_seconds=float((state or {}).get(SPENT_SECONDS, 0.0)),
            interruptions=context.generation - 1,
            planned_life_seconds=context.planned_life_seconds,
        )
        self.last_cost: Cost | None = None
        self._context = context
        self._committed = committed
        self._publisher = CheckpointPublisher(
            context.store,
            context.lease,
            events=context.events,
            metrics=context.metrics,
            retention=context.retention,
        )
        self._copies = HostCopies(context.store.part_process)
        self._leader: ShardedLeader | None = None
        self._current: TensorSave | None = None  # under way, or over and not collected
        self._staged: TensorSave | None = None
        self._lock = threading.Lock()  # of the staged copy and the end
        self._since_notice: Position | None = None  # committed at a notice; training continued
        self._is_safe: bool | None = None  # once the last save has been decided

    @staticmethod
    def stream_all() -> None:
        """Make all saves of this process stream, as if the host had no memory for a copy."""
        HostCopies.spare_bytes = sys.maxsize

    def use_leader(self, leader: ShardedLeader | None, num_copiers: int = 1) -> None:
        """Make the other ranks write their shares from now on; None if the stage is not sharded.

        `num_copiers` processes of this machine copy their state at the same moment.
        """
        self._leader = leader
        self._copies = HostCopies(self._context.store.part_process, num_copiers)

    def prepare(self, live: LiveState) -> None:
        """Allocate the memory of a stage's first copy in the background."""
        self._copies.prepare(live)

    def holds(self, position: Position) -> bool:
        """Whether nothing changed since the last commit (a stage's start is derived, not saved)."""
        return position.stage_step == 0 or position == self._committed

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, or is over and not yet polled."""
        return self._current is not None

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the save under way; return whether it is over."""
        return self._current is None or self._current.wait(seconds)

    def poll(self) -> None:
        """Collect the save under way if it is over; cheap, so call it at every boundary.

        A refusal by the store is logged, and raised only after it has failed for long; any other
        error is raised.
        """
        if self._current is not None and self._current.is_over:
            self._collect()

    def save(self, request: SaveRequest) -> None:
        """Commit before returning, straight from the live tensors; refuses weights with a NaN.

        If the store fails at the end of a stage, that is raised: the next stage reads it back.
        """
        self._finish()
        self._supersede()
        self.schedule.start_other()
        write = self._write(request, request.state)
        self._order("live", write.request.entry.name)
        self._run(write)

    def save_async(self, request: SaveRequest) -> None:
        """Commit in the background; training continues once the state is copied to the host.

        Waits for a save that is still under way. If that makes no headway, this boundary is left
        out, unless it is a new best. If the host cannot hold a copy, the state is streamed from
        the device and committed before this returns.
        """
        asked = time.monotonic()
        if not self._finish(may_leave=not request.position.is_best):
            self.schedule.is_overdue = True
            return
        self.schedule.start_due(request.position)
        began = time.monotonic()
        writing = self._supersede()
        self._order("copy", request.entry.name)
        copy = self._copies.copy(request.state, writing)
        if copy is None:
            _log.info("[save] memory cannot hold a copy of the state; streaming it")
            self._run(self._write(request, request.state))
            return
        self._current = self._write(request, copy)
        self._current.began = began
        self._current.blocked_seconds = time.monotonic() - asked
        self._current.start()

    def stage(self, request: SaveRequest) -> bool:
        """Keep a copy for `save_staged`; False if memory cannot hold it."""
        position = request.position
        if self.holds(position) or (self._current and self._current.request.position == position):
            return True
        writing = self._supersede()
        self._order("stage", request.entry.name)
        copy = self._copies.copy(request.state, writing)
        everywhere = self._leader is None or self._leader.have_staged(copy is not None)
        if copy is None or not everywhere:
            return False
        with self._lock:
            self._staged = self._write(request, copy)
        return True

    def estimate(self, request: SaveRequest) -> Cost:
        """How long a save of this state will take."""
        return estimate(self._write(request, request.state).num_bytes, self.last_cost)

    def save_and_release(self, request: SaveRequest, notice: Notice) -> bool:
        """Commit and release in one write within the notice; return whether the state is safe.

        If there is not enough time, the previous checkpoint stays the newest and the lease is
        released, so that the successor need not wait.
        """
        with self._lock:
            if self._is_safe is None:
                write = self._write(request, request.state)
                self._is_safe = self._save_within(notice, write)
                if not self._is_safe:
                    self._order("drop", write.request.entry.name)
            return self._is_safe

    def save_at_notice(self, request: SaveRequest, notice: Notice) -> bool:
        """Commit within the notice and keep the lease; return whether training may continue.

        It may not if time or the store allows no commit, or only one of an older state.
        """
        with self._lock:
            self._staged = None  # older than what is committed
            write = self._write(request, request.state)
            self._save_within(notice, write, releases=False)
            if self.holds(request.position):
                self._since_notice = request.position
            else:
                self._order("drop", write.request.entry.name)
            return self._since_notice is not None

    def save_staged(self, notice: Notice) -> bool:
        """Commit the staged copy and release, from any thread, when no boundary comes in time."""
        with self._lock:
            if self._is_safe is None:
                self._is_safe = self._save_within(notice, self._staged)
            return self._is_safe

    def must_start_by(self, notice: Notice) -> float:
        """The monotonic time after which `save_staged` would no longer fit the notice."""
        size = self._staged.num_bytes if self._staged else 0
        return notice.save_by - estimate(size, self.last_cost).seconds

    def close(self) -> None:
        """Finish the save under way, whose state was good; cancel it if the lease is lost."""
        write, self._current = self._current, None
        if self._context.lease.lost.is_set():
            if write is not None:
                write.cancel()
                write.wait(_CLEANUP_SECONDS)
            self._context.lease.delete_if_lost()
        elif write is None:
            return
        elif not write.wait(_CLOSE_SECONDS):
            write.cancel()
        else:
            self._collect_at_end(write)

    def _write(self, request: SaveRequest, state: LiveState | HostCopy) -> TensorSave:
        return TensorSave(
            self._publisher,
            request,
            state,
            others=self._leader.wait_for if self._leader else None,
            since_notice=self._since_notice,
        )

    def _order(self, verb: Verb, name: str) -> None:
        """Order the other ranks of a sharded stage to act on their shares of a save."""
        if self._leader is not None:
            self._leader.order(verb, name)

    def _supersede(self) -> HostCopy | None:
        """Forget the staged copy, before any rank needs its memory; return the one being sent.

        Does not return if the staged copy is being saved.
        """
        with self._lock:
            self._staged = None
            writing = self._current.state if self._current else None
        return writing if isinstance(writing, HostCopy) else None

    def _run(self, write: TensorSave) -> None:
        self._current = write
        write.start()
        self._await(write)
        write.blocked_seconds = time.monotonic() - write.began
        # The next interval counts from here: a save longer than that would follow each step.
        self.schedule.start_other()
        self._collect()

    def _finish(self, *, may_leave: bool = False) -> bool:
        """Wait for the save under way and collect it; False if it makes no headway and is left."""
        if self._current is not None:
            if not self._await(self._current, may_leave=may_leave):
                return False
            self._collect()
        return True

    def _await(self, write: TensorSave, *, may_leave: bool = False) -> bool:
        """Wait for a save; while it makes headway, the watchdog takes the wait for no hang."""
        while not write.wait(_PIECE_SECONDS):
            if time.monotonic() - write.progress.moved_at <= _HEADWAY_SECONDS:
                self._context.supervisor.watchdog.beat()
            elif may_leave:
                return False
        return True

    def _collect(self) -> None:
        write, self._current = self._current, None
        assert write is not None
        if write.error is None:
            self._record(write)
            return
        self._order("drop", write.request.entry.name)
        if not isinstance(write.error, StoreError) or write.request.entry.kind == "stage-end":
            raise write.error
        failed = self.schedule.failed
        failed.add(write.began)
        if failed.is_hopeless:
            raise write.error
        _log.warning(
            "[save] step %d was not saved, %d in a row: %s; the last commit stays; training "
            "continues and the save is retried",
            write.request.position.step,
            failed.count,
            write.error,
        )

    def _collect_at_end(self, write: TensorSave) -> bool:
        """Collect a save that is over when the attempt ends; return whether it was committed."""
        is_grave = isinstance(write.error, RunFailedError | LeaseLostError)
        # A divergence need not end the run: the next attempt resumes before it.
        if write.error is not None and is_grave and not isinstance(write.error, DivergedError):
            raise write.error
        if write.error is not None:
            _log.warning("[save] failed: %s; the last commit stays", write.error)
            return False
        self._record(write)
        return True

    def _record(self, write: TensorSave) -> None:
        """Record a commit in the metrics, the schedule and the log."""
        assert write.cost is not None
        self._committed = write.request.position
        self.last_cost, step = write.cost, write.request.position.step
        durable = write.cost.seconds
        # A save in the background may use training's cores, or hold its interpreter lock.
        slowed = self.schedule.pace.take_lost_seconds(max(0.0, durable - write.blocked_seconds))
        self._publisher.record(write, blocked_seconds=write.blocked_seconds, slowed_seconds=slowed)
        if (choice := self.schedule.measure(write.blocked_seconds + slowed, durable)) is not None:
            _log.info("[interval] auto: %s", choice)
            self._context.metrics.write("interval", step=step, **asdict(choice))

    def _save_within(
        self, notice: Notice, write: TensorSave | None, *, releases: bool = True
    ) -> bool:
        """Save what the time allows, again after a failure; return whether the state is safe."""
        for pause in self._context.store.patience.pauses():
            time.sleep(pause)
            if self._try_within(notice, write, releases):
                return True
            # The staged copy begins so late that no other save would fit.
            if write is None or write is self._staged or not isinstance(write.error, StoreError):
                break
            # Under another name: a rank has announced its share, or an error, under the old one.
            entry = write.request.entry
            self._order("drop", entry.name)
            entry = replace(entry, name=checkpoint_name(entry.step, self._context.generation))
            write = self._write(replace(write.request, entry=entry), write.state)
        return False

    def _try_within(self, notice: Notice, write: TensorSave | None, releases: bool) -> bool:
        """Save the new state, the save under way, or both."""
        current, self._current = self._current, None
        if current is not None and current.is_over:
            self._collect_at_end(current)
            current = None
        if current is not None and (
            write is None or current.request.position == write.request.position
        ):
            _log.info("[emergency] this state is being saved already; finishing that save")
            if self._end_with(current, notice, releases) or write is None:
                return current.is_committed
            current = None  # it failed: once more, if there is time
        if write is None or self.holds(write.request.position):
            then = "only releasing" if releases else "nothing to save"
            _log.info("[emergency] nothing changed since the last commit; %s", then)
            return True
        expected = estimate(write.num_bytes, self.last_cost)
        finish = current.seconds_left(expected.seconds) if current else None
        budget = SaveBudget(
            cost=expected,
            step_seconds=max(0.0, time.monotonic() - notice.received),
            reserve_seconds=notice.deadline - notice.save_by,
            seconds_left=notice.seconds_left,
            finish_seconds=finish,
        )
        _log.info("[emergency] %s", budget)
        if budget.plan == "give up":
            _log.warning("[emergency] not enough time; the last commit stays")
            if current is not None:
                self._finish_soon(current, _GRACE_SECONDS)
            return False
        if current is not None and budget.plan == "finish":
            _log.info("[emergency] too little time for this step; finishing the previous save")
            return self._end_with(current, notice, releases)
        if current is not None:
            self._make_way(current, budget)
        if write is not self._staged:
            self._order("live", write.request.entry.name)
        elif self._leader is not None:
            self._leader.write_staged(write.request.entry.name)
        write.began = time.monotonic()
        write.notice, write.releases = notice, releases
        write.start()
        return self._end_with(write, notice, releases)

    def _make_way(self, current: TensorSave, budget: SaveBudget) -> None:
        """Let the older save finish if there is time for both, else cancel it."""
        if budget.plan != "finish, then save" and current.cancel():
            _log.info("[emergency] the save under way is canceled for this one")
        else:
            self._finish_soon(current, budget.seconds_left - budget.need_seconds)

    def _finish_soon(self, current: TensorSave, seconds: float) -> None:
        """Let a save finish within `seconds`; otherwise it is never committed."""
        if current.wait(max(0.0, seconds)) or not current.cancel():
            current.wait()  # it cannot be canceled while it writes the head, which is bounded
            self._collect_at_end(current)

    def _end_with(self, write: TensorSave, notice: Notice, releases: bool) -> bool:
        write.notice, write.releases = notice, releases
        asked = time.monotonic()
        grace = 0.0 if write.request.entry.kind == "emergency" else _GRACE_SECONDS

        def seconds_left() -> float:
            in_notice = notice.save_by - time.monotonic()
            return max(0.0, in_notice, asked + grace - time.monotonic())

        # In pieces: another notice may bring the deadline nearer.
        while not write.wait(min(seconds_left(), _PIECE_SECONDS)) and seconds_left():
            pass
        if not write.is_over and write.cancel():
            _log.warning("[emergency] the upload was too slow; the last commit stays")
            return False
        write.wait()  # the head is being written, which is bounded
        return self._collect_at_end(write)
