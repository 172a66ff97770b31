"""The extra time of a notice: what is left of it after the first commit, and what may begin in it.

The first commit makes the state safe at once; then training goes on until a last save, by what that
first one cost, would only just end before the machine does. Imports no torch.
"""

import logging
import threading
from typing import Literal, TypeAlias, get_args

from training.interruption.notice import Interruption, Notice
from training.record.candidates import is_waited_for
from training.store.protocol import Store

Policy: TypeAlias = Literal["train-on", "stop"]
_log = logging.getLogger(__name__)

POLICIES: tuple[Policy, ...] = get_args(Policy)

# Of what was measured: a save or a step may take so many times as long as the last or the longest.
_SAFETY = 1.5
# Kept for the release, and for a machine that goes early: sizing plans with the same ten seconds.
# Of a short notice a fifth: LastResort, which ends what does not come in time, keeps 15 %.
_MARGIN_SECONDS = 10.0
_MARGIN_SHARE = 0.2
_CANDIDATE_POLL_SECONDS = 2.0


class ExtraTime:
    """Of one attempt; each rank has its own, and they agree before they act."""

    def __init__(self, interruption: Interruption, policy: Policy) -> None:
        self._interruption = interruption
        self._policy = policy
        self._save_seconds: float | None = None
        self._follows = False
        self.ended = threading.Event()  # with the attempt
        self.is_heard = False  # the notice, by the main thread
        self.is_wanted = False  # the lease, by a candidate that waits for it

    @property
    def is_granted(self) -> bool:
        """Whether training goes on after a notice."""
        return self._save_seconds is not None

    @property
    def must_end(self) -> bool:
        """Whether a notice or shutdown has come, and no more time is left to what was begun."""
        if not self._interruption.is_pending:
            return False
        return self._save_seconds is None or not self.allows(0.0)

    def follow(self) -> None:
        """This rank saves nothing and may be on a machine without a notice: rank 0 reckons."""
        self._follows = True

    def grant(self, save_seconds: float) -> None:
        """Go on; the last save is expected to take so long."""
        self._save_seconds = save_seconds

    def allows(self, work_seconds: float | None) -> bool:
        """Whether work of so many seconds and the last save still fit; None was never measured."""
        return self._save_seconds is not None and self.would_allow(work_seconds, self._save_seconds)

    def would_allow(
        self, work_seconds: float | None, save_seconds: float | None, first: float = 0.0
    ) -> bool:
        """The same, were the last save to take `save_seconds`, after a `first` one."""
        if self._interruption.is_shutting_down or work_seconds is None or save_seconds is None:
            return False
        if self._follows:
            return True
        notice = self._interruption.notice
        if notice is None or notice.cause != "notice" or not notice.is_dated:
            return False  # an end without a known time may come at any moment
        if self._policy == "stop" or self.is_wanted:
            return False
        need = first + _SAFETY * (work_seconds + save_seconds) + margin_of(notice)
        return need <= notice.seconds_left


def margin_of(notice: Notice) -> float:
    """Seconds that are to be left when the last save has ended."""
    return min(_MARGIN_SECONDS, _MARGIN_SHARE * (notice.deadline - notice.received))


def watch_for_candidates(store: Store, generation: int, extra_time: ExtraTime) -> None:
    """Look from a thread of its own, until somebody waits or the attempt ends."""

    def watch() -> None:
        while not is_waited_for(store, generation):
            if extra_time.ended.wait(_CANDIDATE_POLL_SECONDS):
                return
        _log.info("[notice] another machine is waiting for the lease")
        extra_time.is_wanted = True

    threading.Thread(target=watch, name="candidates", daemon=True).start()
