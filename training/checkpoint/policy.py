"""What the loop asks of the saver at its step boundaries. Rank 0 alone has a saver.

A capture is asked for only where it is used: it reads the numbers of the last step first. Where the
stage is sharded the other ranks come to the same points, and write their shares as rank 0 orders.
"""

import socket
from collections.abc import Callable

from training.checkpoint.checkpointer import Saver
from training.checkpoint.sharded import own_share
from training.checkpoint.sharded_follower import ShardedFollower
from training.checkpoint.sharded_leader import ShardedLeader
from training.checkpoint.state import LiveState
from training.interruption.long_work import Work
from training.interruption.notice import InterruptedRunError, Notice
from training.ranks.context import Attempt
from training.record.position import Position


class Commits:
    """The commits of one stage."""

    def __init__(
        self,
        attempt: Attempt,
        saver: Saver | None,
        steps_per_epoch: int,
        capture: Callable[[], LiveState],
        *,
        is_sharded: bool,
    ) -> None:
        self._attempt = attempt
        self._saver = saver
        self._steps_per_epoch = steps_per_epoch
        self._capture = capture
        self._crew: ShardedLeader | None = None
        self._deputy: ShardedFollower | None = None
        if is_sharded:
            self._share(capture)
        elif saver is not None:
            saver.share_with(None)

    def if_due(self, position: Position) -> bool:
        """A periodic or recommended commit; whether there was one."""
        return self._at_a_point(lambda saver: self._if_due(saver, position))

    def before(self, work: Work, position: Position) -> None:
        """Have a copy at hand if a notice could come in long work: staged, or else committed."""
        self._at_a_point(lambda saver: self._before(saver, work, position))

    def at_the_end(self, position: Position) -> None:
        """The stage is done: what comes next begins from what is read back from this commit."""

        def commit(saver: Saver) -> None:
            saver.commit(self._capture(), position, self._epoch(position), "stage-end")

        self._at_a_point(commit)

    def at_a_notice(self, position: Position, work_seconds: float | None) -> None:
        """Commit; raise InterruptedRunError, on all ranks alike, unless such work may yet begin.

        At first whatever happens to be at hand is made safe. Then training goes on as long as the
        work to come and a last save still fit, which releases in its own write.
        """
        attempt, extra_time = self._attempt, self._attempt.extra_time
        if extra_time.is_granted:
            if attempt.agree(extra_time.allows(work_seconds)):
                return
            notice = attempt.hear_notice()
            self._at_a_point(lambda saver: self._release(saver, position, notice))
        else:
            notice = attempt.hear_notice()
            cost = self._answer(position, work_seconds, notice)
            if attempt.agree(extra_time.would_allow(work_seconds, cost)):
                assert cost is not None
                attempt.go_on(notice, cost)
                return
        if self._deputy is not None:
            self._deputy.give_up()
        raise InterruptedRunError(attempt.hear_notice().cause)

    def close(self) -> None:
        """The stage, or the attempt, is over."""
        if self._deputy is not None:
            self._deputy.close()

    def _share(self, capture: Callable[[], LiveState]) -> None:
        world = self._attempt.world
        self._capture = lambda: own_share(capture(), world.rank)
        hosts = world.gather(socket.gethostname())
        num_here = hosts.count(hosts[world.rank])
        if self._saver is not None:
            self._crew = ShardedLeader(world)
            self._saver.share_with(self._crew, num_here)
        else:
            self._deputy = ShardedFollower(self._attempt, num_here)

    def _at_a_point(self, act: "Callable[[Saver], bool | None]") -> bool:
        """Where all ranks of a sharded stage come to, and rank 0 alone acts; whether it did."""
        if self._deputy is not None:
            return self._deputy.obey(self._capture)
        if self._saver is None:
            return False
        if self._crew is None:
            return bool(act(self._saver))
        with self._crew.leading():
            return bool(act(self._saver))

    def _if_due(self, saver: Saver, position: Position) -> bool:
        saver.poll()
        if self._attempt.interruption.take_rebalance():
            saver.commit(self._capture(), position, self._epoch(position), "rebalance")
        elif saver.is_due(position, self._steps_per_epoch):
            saver.begin(self._capture(), position, self._epoch(position))
        else:
            return False
        return True

    def _answer(
        self, position: Position, work_seconds: float | None, notice: Notice
    ) -> float | None:
        """The first save of a notice; what the last will take, or None where there is to be none.

        Ranks without a saver give 0: rank 0 reckons.
        """
        where = {"step": position.step, "stage_step": position.stage_step}
        self._attempt.metrics.write("notice", stage=position.stage, **where)
        cost: float | None = 0.0 if self._saver is None else None

        def commit(saver: Saver) -> None:
            nonlocal cost
            capture = self._capture()
            expected = saver.expected(capture, position).seconds
            first = 0.0 if saver.holds(position) else expected
            if not self._attempt.extra_time.would_allow(work_seconds, expected, first):
                self._release(saver, position, notice)
            elif saver.commit_at_notice(capture, position, self._epoch(position), notice):
                measured = saver.expected(capture, position)
                cost = measured.seconds if measured.is_measured else None
                print(f"[notice] safe, {notice.seconds_left:.1f} s left", flush=True)

        self._at_a_point(commit)
        return cost

    def _release(self, saver: Saver, position: Position, notice: Notice) -> None:
        """Save and release in one write, as far as the time allows."""
        saver.emergency(self._capture(), position, self._epoch(position), notice)

    def _before(self, saver: Saver, work: Work, position: Position) -> None:
        if not self._attempt.supervisor.long_work.is_long(work) or saver.holds(position):
            return
        epoch, capture = self._epoch(position), self._capture()
        if not saver.stage(capture, position, epoch):
            saver.commit(capture, position, epoch, "periodic")

    def _epoch(self, position: Position) -> int:
        return position.stage_step // self._steps_per_epoch
