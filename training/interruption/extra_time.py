"""The extra time of a notice: what is left after the first commit, and which work fits into it.

The first commit makes the state safe at once; then training continues until a last save, at the
cost of the first, would only just end before the machine does. Imports no torch.
"""

import logging
import threading

from contract.notice import Policy, last_save_needs
from training.interruption.notice import Interruption
from training.record.candidates import is_waited_for
from training.store.protocol import Store

_log = logging.getLogger(__name__)

_CANDIDATE_POLL_SECONDS = 2.0


class ExtraTime:
    """The extra time of one attempt; each rank has its own, and they agree before they act."""

    def __init__(self, interruption: Interruption, policy: Policy) -> None:
        self._interruption = interruption
        self._policy = policy
        self._save_seconds: float | None = None
        self._follows = False
        self.ended = threading.Event()  # set when the attempt ends
        self.is_notice_taken = False  # by the main thread
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
        return self._save_seconds is None or not self.allows(0.0)

    def follow(self) -> None:
        """Leave the arithmetic to rank 0: this rank saves nothing, and may have no notice."""
        self._follows = True

    def grant(self, save_seconds: float) -> None:
        """Let training continue; the last save is expected to take `save_seconds`."""
        self._save_seconds = save_seconds

    def allows(self, work_seconds: float | None) -> bool:
        """Whether work of that duration (None: unknown) and the last save still fit."""
        return self._save_seconds is not None and self.would_allow(work_seconds, self._save_seconds)

    def would_allow(
        self, work_seconds: float | None, save_seconds: float | None, first: float = 0.0
    ) -> bool:
        """As `allows`, if the last save takes `save_seconds` and another `first` seconds before."""
        if self._interruption.is_shutting_down or work_seconds is None or save_seconds is None:
            return False
        if self._follows:
            return True
        notice = self._interruption.notice
        if notice is None or notice.cause != "notice" or not notice.is_dated:
            return False  # an end without a known time may come at any moment
        if self._policy == "stop" or self.is_lease_wanted:
            return False
        need = first + last_save_needs(
            work_seconds=work_seconds,
            save_seconds=save_seconds,
            notice_seconds=notice.deadline - notice.received,
        )
        return need <= notice.seconds_left


def watch_for_candidates(store: Store, generation: int, extra_time: ExtraTime) -> None:
    """Watch from a thread, until a candidate waits or the attempt ends."""

    def watch() -> None:
        while not is_waited_for(store, generation):
            if extra_time.ended.wait(_CANDIDATE_POLL_SECONDS):
                return
        _log.info("[notice] another machine is waiting for the lease")
        extra_time.is_lease_wanted = True

    threading.Thread(target=watch, name="candidates", daemon=True).start()
