"""What happens at a notice: signal, the program saves, snapshot, release, in this order.

A program that does not handle its signal would only die of it: it goes on, mirrored, until just
before the last snapshot must begin, as one that wants no signal. Imports no torch.
"""

import json
import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.notice import last_save_needs
from training.attempt.notice import Notice
from training.program.process import ProgramProcess

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticePlan:
    """The budget of a notice; the times are monotonic."""

    signal_number: int | None  # None: it is not sent
    program_until: float  # when the last snapshot begins, if the program has not ended by then
    deadline: float
    save_seconds: float  # expected of the last snapshot
    why: str

    @classmethod
    def of(
        cls,
        notice: Notice,
        process: ProgramProcess,
        *,
        signal_name: str,
        save_seconds: float,
        quiet_seconds: float,
    ) -> "NoticePlan":
        """Decide who gets how much of the time that is left."""
        needs = last_save_needs(
            work_seconds=0.0,
            save_seconds=save_seconds,
            notice_seconds=notice.deadline - notice.received,
        )
        now = time.monotonic()
        until = max(now, notice.deadline - needs)
        number = None if signal_name == "none" else int(signal.Signals[signal_name])
        why = "the program wants none"
        if number is not None and process.catches(number) is False:
            number, why = None, f"the program does not handle {signal_name}"
        if number is None and notice.cause == "shutdown":
            # Nothing takes the machine away: one more quiet moment, then the end.
            until = min(until, now + quiet_seconds + save_seconds)
        return cls(
            signal_number=number,
            program_until=until,
            deadline=notice.deadline,
            save_seconds=save_seconds,
            why="" if number is not None else why,
        )

    def to_event(self) -> dict[str, Any]:
        """The budget, for the event of the notice."""
        now = time.monotonic()
        sent = "none" if self.signal_number is None else signal.Signals(self.signal_number).name
        return {
            "seconds_left": round(self.deadline - now, 3),
            "program_seconds": round(self.program_until - now, 3),
            "snapshot_seconds": round(self.save_seconds, 3),
            "signal": sent,
        }

    def log(self) -> None:
        """Print the budget."""
        now = time.monotonic()
        told = (
            f"no signal, as {self.why}"
            if self.signal_number is None
            else f"{signal.Signals(self.signal_number).name} sent"
        )
        _log.info(
            f"[notice] {self.deadline - now:.1f} s: {told}; the program has "
            f"{self.program_until - now:.1f} s, its last snapshot takes about "
            f"{self.save_seconds:.1f} s, the rest is reserve"
        )


def write_notice(path: Path, notice: Notice) -> None:
    """Write the file that tells the program; it is there whole or not at all."""
    left = notice.seconds_left
    record = {"deadline": round(time.time() + left, 3), "seconds": round(left, 3)}
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(record))
    part.replace(path)
