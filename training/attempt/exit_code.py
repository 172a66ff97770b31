"""The exit code of each expected error, and the one line that reports it."""

import errno
import sys
from collections.abc import Callable

from training.attempt.notice import InterruptedRunError
from training.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LEASE_LOST,
    EXIT_MACHINE,
    EXIT_STOPPED,
    EXIT_STORE,
    EXIT_USER,
    MachineError,
    OutOfMemoryError,
    ProgramFailedError,
    RankLostError,
    RunFailedError,
    UserError,
    WorkerLostError,
)
from training.record.lease import InterruptedWhileWaitingError, LeaseLostError
from training.store.protocol import StoreError

_EXIT_CODES: dict[type[Exception], int] = {
    UserError: EXIT_USER,
    MachineError: EXIT_MACHINE,
    LeaseLostError: EXIT_LEASE_LOST,
    InterruptedRunError: EXIT_INTERRUPTED,
    InterruptedWhileWaitingError: EXIT_INTERRUPTED,
    RunFailedError: EXIT_FAILED,
    OutOfMemoryError: EXIT_FAILED,
    ProgramFailedError: EXIT_FAILED,
    RankLostError: EXIT_FAILED,
    WorkerLostError: EXIT_FAILED,
    StoreError: EXIT_STORE,
}
# Whatever this machine was doing, another one has room.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def exit_code_of(act: Callable[[], int]) -> int:
    """Call `act`; return its exit code, or that of the expected error that it raises."""
    try:
        return act()
    except tuple(_EXIT_CODES) as error:
        code = next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))
        if code == EXIT_INTERRUPTED:
            return _report(f"{error}; the next attempt resumes from the last commit", code)
        return _report(error, code)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        name = error.filename2 or error.filename
        what = f"the disk is full, {name} cannot be written" if name else "the disk is full"
        return _report(f"{what}; free some of it, or use a larger one", EXIT_MACHINE)
    except KeyboardInterrupt:
        # Only in commands that do not train: a trainer handles signals in its own thread.
        return _report("stopped by Ctrl-C before it finished; run it again", EXIT_STOPPED)


def _report(error: object, code: int) -> int:
    print(f"{'interrupted' if code == EXIT_INTERRUPTED else 'error'}: {error}", file=sys.stderr)
    return code
