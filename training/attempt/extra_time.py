"""The extra time of a notice: whether training continues after its first commit, and for how long.

The first commit makes the state safe at once; then training continues until a last save, at the
cost of the first, would only just end before the machine does. All of that is decided in `answer`.
Imports no torch.
"""

import logging
import threading
import time
from typing import Protocol

from contract.notice import Policy
from training.attempt.notice import InterruptedRunError, Interruption, Notice
from training.record.head import is_waited_for
from training.record.lease import Lease
from training.store.protocol import Store

_log = logging.getLogger(__name__)

_CANDIDATE_POLL_SECONDS = 2.0


class Saves:
    """What can be saved at a boundary in a notice; all ranks call each method.

    Here nothing, for work that publishes by itself, such as shards.
    """

    def begin(self) -> tuple[float, float]:
        """At the first boundary: seconds that a save now, and a last one later, will take."""
        return 0.0, 0.0

    def commit(self, notice: Notice) -> float | None:
        """Save and keep the lease; seconds that the last save will take, None: there is none."""
        return 0.0

    def end(self, notice: Notice) -> None:
        """Save for the last time, and release the lease in the same write."""


class Ranks(Protocol):
    """The agreement of the ranks (training/attempt/context.py)."""

    def all_agree(self, is_in_favor: bool) -> bool:
        """Whether every rank is in favor."""

    def take_notice(self) -> Notice:
        """The notice, for the main thread to answer in place of the last resort."""

    def leave_to_last_resort(self, notice: Notice) -> None:
        """Have the last resort watch again: the main thread goes on with its work."""


class ExtraTime:
    """The extra time of one attempt; each rank has its own, and they agree before they act."""

    def __init__(self, interruption: Interruption, policy: Policy) -> None:
        self._interruption = interruption
        self._policy = policy
        self._save_seconds: float | None = None
        self._follows = False
        self._lease: tuple[Store, Lease] | None = None
        self._ended = threading.Event()
        self.is_lease_wanted = False  # a candidate is waiting for it

    @property
    def is_granted(self) -> bool:
        """Whether training continues after a notice."""
        return self._save_seconds is not None

    @property
    def must_stop(self) -> bool:
        """Whether a notice or shutdown has come and no time is left for the work in progress."""
        if not self._interruption.is_pending:
            return False
        return self._save_seconds is None or not self.would_allow(0.0, self._save_seconds)

    def hold(self, store: Store, lease: Lease) -> None:
        """On rank 0: end early if a candidate waits for this lease."""
        self._lease = store, lease

    def follow(self) -> None:
        """Leave the arithmetic to rank 0: this rank saves nothing, and may have no notice."""
        self._follows = True

    def close(self) -> None:
        """The attempt ends."""
        self._ended.set()

    def watch_candidates(self) -> None:
        """On rank 0: have `is_lease_wanted` say, from here on, whether a candidate waits."""
        threading.Thread(target=self._watch, name="candidates", daemon=True).start()

    def answer(self, ranks: Ranks, work_seconds: float | None, saves: Saves) -> None:
        """At a boundary in a notice: save what is due; InterruptedRunError, on all ranks alike,
        unless the next work (None: of unknown duration) and the last save after it still fit.
        """
        if self._save_seconds is not None:
            if ranks.all_agree(self.would_allow(work_seconds, self._save_seconds)):
                return
            notice = ranks.take_notice()
            saves.end(notice)
        else:
            notice = ranks.take_notice()
            now, last = saves.begin()
            save_seconds = None
            if self.would_allow(work_seconds, last, now):
                save_seconds = saves.commit(notice)
            else:
                saves.end(notice)
            if ranks.all_agree(self.would_allow(work_seconds, save_seconds)):
                assert save_seconds is not None
                self._grant(notice, save_seconds)
                ranks.leave_to_last_resort(notice)
                return
        raise InterruptedRunError(notice.cause)

    def _grant(self, notice: Notice, save_seconds: float) -> None:
        self._save_seconds = save_seconds
        if self._lease is not None:
            _log.info("[notice] safe, %.1f s left", notice.seconds_left)
            self.watch_candidates()

    def would_allow(
        self, work_seconds: float | None, save_seconds: float | None, first: float = 0.0
    ) -> bool:
        """Whether work, a last save after it, and `first` seconds before it still fit."""
        if self._interruption.is_shutting_down or work_seconds is None or save_seconds is None:
            return False
        if self._follows:
            return True
        notice = self._interruption.notice
        if notice is None or notice.cause != "notice" or not notice.is_dated:
            return False  # an end without a known time may come at any moment
        if self._policy == "stop" or self.is_lease_wanted:
            return False
        return time.monotonic() + first <= notice.last_save_at(save_seconds, work_seconds)

    def _watch(self) -> None:
        """Watch from a thread, until a candidate waits or the attempt ends."""
        assert self._lease is not None
        store, lease = self._lease
        while not is_waited_for(store, lease.head.generation):
            if self._ended.wait(_CANDIDATE_POLL_SECONDS):
                return
        _log.info("[notice] another machine is waiting for the lease")
        self.is_lease_wanted = True
