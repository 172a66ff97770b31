"""Everything that may stop an attempt: notices, hangs, lost ranks. Imports no torch."""

from pathlib import Path

from contract.notice import Policy
from training.interruption.extra_time import ExtraTime
from training.interruption.last_resort import LastResort
from training.interruption.long_work import LongWork
from training.interruption.notice import Interruption
from training.interruption.watchdog import Watchdog


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
        self.interruption = Interruption(budget_seconds=budget_seconds, notice_file=notice_file)
        self.extra_time = ExtraTime(self.interruption, notice_policy)
        self.last_resort = LastResort(self.interruption)
        self.watchdog = Watchdog(watchdog_seconds, self.last_resort.fail, notify_socket)
        self.long_work = LongWork(budget_seconds, self.watchdog)

    def begin(self) -> None:
        """Listen and watch; until then a signal without a handler ends the process."""
        self.interruption.listen()
        self.watchdog.start()

    def close(self) -> None:
        """Stop supervising: the process ends by itself."""
        self.extra_time.close()
        self.last_resort.stand_down()
        self.watchdog.close()
        self.interruption.close()
