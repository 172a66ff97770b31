"""Everything that may stop an attempt: notices, hangs, lost ranks. Imports no torch."""

import logging
import time
from pathlib import Path

from contract.notice import Policy
from training.attempt.extra_time import ExtraTime
from training.attempt.last_resort import LastResort
from training.attempt.long_work import LongWork
from training.attempt.notice import Interruption
from training.attempt.watchdog import Watchdog
from training.record.head import Head
from training.record.lease import Lease, acquire
from training.store.protocol import Store

_log = logging.getLogger(__name__)


class Supervisor:
    """Supervises one attempt, from before the first slow import to the end of the process."""

    def __init__(
        self,
        *,
        budget_seconds: float,
        notice_file: Path | None = None,
        notice_policy: Policy = "train-on",
        watchdog_seconds: float = 0.0,
        notify_socket: str | None = None,
    ) -> None:
        self.began = time.monotonic()
        self.interruption = Interruption(budget_seconds=budget_seconds, notice_file=notice_file)
        self.extra_time = ExtraTime(self.interruption, notice_policy)
        self.last_resort = LastResort(self.interruption)
        self.watchdog = Watchdog(watchdog_seconds, self.last_resort.fail, notify_socket)
        self.long_work = LongWork(budget_seconds, self.watchdog)

    def begin(self) -> None:
        """Listen and watch; until then a signal without a handler ends the process."""
        self.interruption.listen()
        self.watchdog.start()

    def take_lease(
        self, store: Store, run_id: str, writer: str, ttl_seconds: float
    ) -> Lease | Head:
        """Take over the run and hold it, waiting for its holder; its head if it has ended."""

        def waiting(holder: str) -> None:
            line = "[lease] held by %s; taking over if it shows no heartbeat for %g s"
            _log.info(line, holder, ttl_seconds)

        def wait(seconds: float) -> bool:
            self.watchdog.beat()
            return self.interruption.wait(seconds)

        lease = acquire(store, run_id, writer, ttl_seconds, wait, waiting)
        if isinstance(lease, Lease):
            self.last_resort.hold(lease)
            self.extra_time.hold(store, lease)
        return lease

    def follow(self) -> None:
        """In a rank above 0, which holds no lease: only end in time."""
        self.last_resort.follow()
        self.extra_time.follow()
        # Rank 0 may be at work on its own for long, and its watchdog is for all.
        self.watchdog.close()

    def close(self) -> None:
        """Stop supervising: the process ends by itself."""
        self.extra_time.close()
        self.last_resort.stand_down()
        self.watchdog.close()
        self.interruption.close()
