"""Decides what is saved at each step boundary of a stage, and why; the checkpointer saves it.

The state is captured only where it is saved: capturing reads the numbers of the last step first. If
the stage is sharded, the other ranks reach the same points and write their shares on rank 0's
orders.
"""

import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from training.durable.attempt.notice import Notice, Saves
from training.durable.attempt.supervisor import Work
from training.durable.attempt.world import AttemptContext
from training.durable.errors import InterruptedRunError
from training.durable.record.head import CheckpointEntry, Kind, Position, checkpoint_name
from training.durable.save.tensors.checkpointer import Checkpointer, SaveRequest
from training.durable.save.tensors.schedule import SPENT_SECONDS
from training.durable.save.tensors.sharded_saves import ShardedFollower, ShardedLeader, own_share
from training.durable.save.tensors.state import LiveState

_log = logging.getLogger(__name__)

# How much of the time since the last save a commit before long work may take. Large states take
# minutes where each step is long: one before every step would take nearly all of the time.
_SHARE = 0.1


class CheckpointPolicy:
    """Decides what one stage saves. Ranks above 0 have no checkpointer, and follow."""

    def __init__(
        self,
        context: AttemptContext,
        checkpointer: Checkpointer | None,
        steps_per_epoch: int,
        capture: Callable[[], LiveState],
        *,
        unread: Callable[[], LiveState] | None = None,
        is_sharded: bool,
        num_steps: int = 0,
        seconds_for: Callable[[int], float | None] = lambda num_steps: None,
    ) -> None:
        self._context = context
        self._checkpointer = checkpointer
        self._steps_per_epoch = steps_per_epoch
        self._capture = capture
        # The state's tensors without the wait for the last step's numbers.
        self._unread = unread or capture
        self._num_steps = num_steps
        self._seconds_for = seconds_for  # that many steps, at the pace so far
        self._generation = 0 if checkpointer is None else context.generation
        self._leader: ShardedLeader | None = None
        self._follower: ShardedFollower | None = None
        self._is_prepared = False
        if is_sharded:
            world = context.world
            self._capture = lambda: own_share(capture(), world.rank)
            hosts = world.gather(socket.gethostname())
            num_here = hosts.count(hosts[world.rank])
            if checkpointer is not None:
                self._leader = ShardedLeader(world)
                checkpointer.use_leader(self._leader, num_here)
            else:
                self._follower = ShardedFollower(context, num_here)
        elif checkpointer is not None:
            checkpointer.use_leader(None)

    def save_if_due(self, position: Position) -> bool:
        """Save if the schedule or a rebalance recommendation asks for it; return whether it did."""
        return self.lead(lambda checkpointer: self._save_if_due(checkpointer, position))

    def protect(self, position: Position, work: Work) -> None:
        """Stage a copy before work during which a notice could not be answered.

        Where memory holds none, commit, but not so often that this is what training waits for.
        """
        self.lead(lambda checkpointer: self._protect(checkpointer, position, work))

    def save_stage_end(self, position: Position) -> None:
        """Commit the end of the stage: what comes next reads it back from this checkpoint."""
        self.lead(lambda checkpointer: checkpointer.save(self.request(position, "stage-end")))

    def answer_notice(self, position: Position, work_seconds: float | None) -> None:
        """Commit; raise InterruptedRunError on every rank unless there is time to train on.

        The next work is expected to take `work_seconds` (None: unknown).
        """
        context, saves = self._context, _NoticeSaves(self, self._context, position)
        try:
            context.supervisor.extra_time.answer(context.consensus, work_seconds, saves)
        except InterruptedRunError:
            if self._follower is not None:
                self._follower.give_up()
            raise

    def close(self) -> None:
        """Finish, because the stage or the attempt is over."""
        if self._follower is not None:
            self._follower.close()

    def lead(self, act: Callable[[Checkpointer], bool | None]) -> bool:
        """Act on rank 0 while the others of a sharded stage follow; return whether it acted."""
        if self._follower is not None:
            return self._follower.obey(self._capture)
        if self._checkpointer is None:
            return False
        if self._leader is None:
            return bool(act(self._checkpointer))
        with self._leader.leading():
            return bool(act(self._checkpointer))

    def request(self, position: Position, kind: Kind) -> SaveRequest:
        """Return a request to save the state as it is now."""
        assert self._checkpointer is not None
        live = self._capture()
        spent = round(self._checkpointer.schedule.spent_seconds, 3)
        seconds_left = self._seconds_left(position)
        return SaveRequest(
            entry=CheckpointEntry(
                name=checkpoint_name(position.step, self._generation),
                step=position.step,
                stage=position.stage,
                epoch=position.stage_step // self._steps_per_epoch,
                kind=kind,
                files=(),
                is_best=position.is_best,
                seconds_left=None if seconds_left is None else round(seconds_left, 1),
            ),
            position=position,
            state=replace(live, state={**live.state, SPENT_SECONDS: spent}),
        )

    def _seconds_left(self, position: Position) -> float | None:
        """Estimate the time of the steps that are left.

        Until this attempt has committed, its pace lacks what commits cost: an earlier one's counts
        if it is slower.
        """
        left = self._num_steps - position.stage_step
        own = self._seconds_for(left)
        for last in self._context.lease.head.checkpoints[-1:]:
            is_own = f"-g{self._generation:04d}-" in last.name
            were_left = left + position.step - last.step
            if not is_own and last.stage == position.stage and last.seconds_left and were_left > 0:
                return max(own or 0.0, last.seconds_left / were_left * left)
        return own

    def _save_if_due(self, checkpointer: Checkpointer, position: Position) -> bool:
        pace = checkpointer.schedule.pace
        pace.end_step(position)
        has_saved = self._save_at_boundary(checkpointer, position)
        pace.begin_step(position, is_saving=checkpointer.is_saving)
        return has_saved

    def _save_at_boundary(self, checkpointer: Checkpointer, position: Position) -> bool:
        checkpointer.poll()
        is_due = checkpointer.schedule.is_due(
            position,
            self._steps_per_epoch,
            is_saving=checkpointer.is_saving,
            epoch_seconds=self._seconds_for(self._steps_per_epoch),
        )
        if self._context.supervisor.interruption.take_rebalance():
            checkpointer.save_async(self.request(position, "rebalance"))
        elif is_due:
            kind: Kind = "best" if position.is_best else "periodic"
            checkpointer.save_async(self.request(position, kind))
        else:
            if not self._is_prepared and self._leader is None:
                self._is_prepared = True
                checkpointer.prepare(self._unread())
            return False
        return True

    def _protect(self, checkpointer: Checkpointer, position: Position, work: Work) -> None:
        if not self._context.supervisor.long_work.is_long(work) or checkpointer.holds(position):
            return
        if checkpointer.stage(request := self.request(position, "emergency")):
            return
        if checkpointer.estimate(request).seconds <= _SHARE * checkpointer.schedule.since_last:
            checkpointer.save(self.request(position, "periodic"))


class _NoticeSaves(Saves):
    """The saves at one boundary during a notice, between which the extra time chooses."""

    def __init__(self, policy: CheckpointPolicy, context: AttemptContext, at: Position) -> None:
        self._policy = policy
        self._context = context
        self._position = at

    def begin(self) -> tuple[float, float]:
        """Ranks without a checkpointer return 0: rank 0 does the arithmetic."""
        position, seconds = self._position, (0.0, 0.0)
        self._context.metrics.write(
            "notice", stage=position.stage, step=position.step, stage_step=position.stage_step
        )

        def estimate(checkpointer: Checkpointer) -> None:
            nonlocal seconds
            last = checkpointer.estimate(self._policy.request(position, "emergency")).seconds
            seconds = (0.0 if checkpointer.holds(position) else last), last

        self._policy.lead(estimate)
        return seconds

    def commit(self, notice: Notice) -> float | None:
        cost: float | None = None if self._context.world.leads else 0.0

        def save(checkpointer: Checkpointer) -> None:
            nonlocal cost
            request = self._policy.request(self._position, "emergency")
            if checkpointer.save_at_notice(request, notice):
                measured = checkpointer.estimate(request)
                cost = measured.seconds if measured.is_measured else None

        self._policy.lead(save)
        return cost

    def end(self, notice: Notice) -> None:
        self._policy.lead(
            lambda checkpointer: checkpointer.save_and_release(
                self._policy.request(self._position, "emergency"), notice
            )
        )
