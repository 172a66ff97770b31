"""The exit code of each expected error, and the one line that reports it."""

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


def exit_code_of(act: Callable[[], int]) -> int:
    """Call `act`; return its exit code, or that of the expected error that it raises."""
    try:
        return act()
    except UserError as error:
        return _report(error, EXIT_USER)
    except MachineError as error:
        return _report(error, EXIT_MACHINE)
    except LeaseLostError as error:
        return _report(error, EXIT_LEASE_LOST)
    except (InterruptedRunError, InterruptedWhileWaitingError) as error:
        return _report(f"{error}; the next attempt resumes from the last commit", EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        # Only in commands that do not train: a trainer handles signals in its own thread.
        return _report("stopped by Ctrl-C before it finished; run it again", EXIT_STOPPED)
    except (
        RunFailedError,
        OutOfMemoryError,
        ProgramFailedError,
        RankLostError,
        WorkerLostError,
    ) as error:
        return _report(error, EXIT_FAILED)
    except StoreError as error:
        return _report(error, EXIT_STORE)


def _report(error: object, code: int) -> int:
    print(f"{'interrupted' if code == EXIT_INTERRUPTED else 'error'}: {error}", file=sys.stderr)
    return code
