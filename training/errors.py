"""The ways to end without a result that are nobody's bug, and the contract's exit codes."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from contract.errors import EXIT_FAILED as EXIT_FAILED
from contract.errors import EXIT_FINISHED as EXIT_FINISHED
from contract.errors import EXIT_INTERRUPTED as EXIT_INTERRUPTED
from contract.errors import EXIT_LEASE_LOST as EXIT_LEASE_LOST
from contract.errors import EXIT_MACHINE as EXIT_MACHINE
from contract.errors import EXIT_NO_MANIFEST as EXIT_NO_MANIFEST
from contract.errors import EXIT_STOPPED as EXIT_STOPPED
from contract.errors import EXIT_STORE as EXIT_STORE
from contract.errors import EXIT_USER as EXIT_USER
from contract.errors import UserError as UserError


class MachineError(RuntimeError):
    """This machine cannot go on, and another one may: one sentence with the reason."""


class RunFailedError(RuntimeError):
    """The run cannot continue and a restart would not help: one sentence with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """What is not finite, and the step that left it so."""

    step: int  # of the run
    message: str  # one clause, which names stage and step
    loss: float | None = None
    gradient_norm: float | None = None


class DivergedError(RunFailedError):
    """This rank has found a divergence; the ranks go back to the last commit together."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(f"{divergence.message}; nothing was published")
        self.divergence = divergence


class GoBackError(RuntimeError):
    """Raised on all ranks alike, after a divergence that at least rank 0 knows."""

    def __init__(self, divergence: Divergence | None) -> None:
        super().__init__("training diverged")
        self.divergence = divergence


class OutOfMemoryError(RuntimeError):
    """Memory ran out in mid-run: the attempt fails, the run may continue on another machine."""


class ProgramFailedError(RuntimeError):
    """A program has ended with an exit code other than 0: the attempt fails, as after a crash."""


class WorkerLostError(RuntimeError):
    """A worker process of the loader ended by itself: as after OutOfMemoryError."""


class RankLostError(RuntimeError):
    """Another rank exited by itself: the attempt fails, the next one resumes the run."""


def name_known(given: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the closest match, and all known names."""
    names = list(known)
    close = difflib.get_close_matches(given, names, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}known are {', '.join(names)}"
