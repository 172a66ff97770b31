"""How an attempt or a command ends: which exit code each error is, and one line that says it."""

import sys
from collections.abc import Callable

from training.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LEASE_LOST,
    EXIT_STOPPED,
    EXIT_USER,
    OutOfMemoryError,
    RankLostError,
    RunFailedError,
    UserError,
)
from training.interruption.notice import InterruptedRunError
from training.record.lease import InterruptedWhileWaitingError, LeaseLostError
from training.store.protocol import StoreError


def exit_code_of(act: Callable[[], int]) -> int:
    """Act; return its exit code, or that of the error that it ended with."""
    try:
        return act()
    except UserError as error:
        return _say(error, EXIT_USER)
    except LeaseLostError as error:
        return _say(error, EXIT_LEASE_LOST)
    except (InterruptedRunError, InterruptedWhileWaitingError) as error:
        return _say(f"{error}; the next attempt goes on from the last commit", EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        # Only of commands that train nothing: a trainer has its own thread for signals.
        return _say("stopped by Ctrl-C before it was done; call it again", EXIT_STOPPED)
    except (RunFailedError, OutOfMemoryError, RankLostError, StoreError) as error:
        return _say(error, EXIT_FAILED)


def _say(error: object, code: int) -> int:
    print(f"{'interrupted' if code == EXIT_INTERRUPTED else 'error'}: {error}", file=sys.stderr)
    return code
