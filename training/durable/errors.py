"""The expected ways to end without a result, which are not bugs, and the contract's exit codes."""

import errno
import sys
from collections.abc import Callable
from dataclasses import dataclass

from contract.errors import Exit, UserError
from contract.readable import shown

# Errors that say this machine's disk is full; another machine may have room.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class AttemptEndedError(RuntimeError):
    """An expected end: one sentence with the reason, and the process's exit code.

    The base class has the exit code of a crash: a restart may help, here or on another machine.
    """

    exit_code = Exit.FAILED


class InterruptedRunError(AttemptEndedError):
    """The attempt stops; raised only at step boundaries, between evaluation batches or shards."""

    exit_code = Exit.INTERRUPTED


class MachineError(AttemptEndedError):
    """This machine cannot go on, but another one may."""

    exit_code = Exit.MACHINE


class RunFailedError(AttemptEndedError):
    """The run cannot continue, and a restart would not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """A value that is not finite, and the step that produced it."""

    step: int  # of the run
    message: str  # one clause that names the stage and step
    loss: float | None = None
    gradient_norm: float | None = None


class DivergedError(RunFailedError):
    """This rank found a divergence; all ranks go back to the last commit together."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(f"{divergence.message}; nothing was published")
        self.divergence = divergence


class GoBackError(RuntimeError):
    """Raised on every rank after a divergence that at least rank 0 knows of."""

    def __init__(self, divergence: Divergence | None) -> None:
        super().__init__("training diverged")
        self.divergence = divergence


def exit_code_of(act: Callable[[], int]) -> int:
    """Call `act`; return its exit code, or that of the expected error that it raises."""
    try:
        return act()
    except UserError as error:
        return _report(error, Exit.USER)
    except AttemptEndedError as error:
        if error.exit_code != Exit.INTERRUPTED:
            return _report(error, error.exit_code)
        return _report(f"{error}; the next attempt resumes from the last commit", Exit.INTERRUPTED)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        name = error.filename2 or error.filename
        what = f"the disk is full: cannot write {name}" if name else "the disk is full"
        return _report(f"{what}; free some space, or use a larger disk", Exit.MACHINE)
    except KeyboardInterrupt:
        # Only in commands that do not train: a trainer handles signals in its own thread.
        return _report("stopped by Ctrl-C before it finished; run it again", Exit.STOPPED)


def _report(error: object, code: int) -> int:
    kind = "interrupted" if code == Exit.INTERRUPTED else "error"
    print(shown(f"{kind}: {error}"), file=sys.stderr)
    return code
