"""The ways to end without a result that are nobody's bug, with the exit codes."""

import difflib
from collections.abc import Iterable

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_NO_MANIFEST = 3
EXIT_INTERRUPTED = 75
EXIT_LEASE_LOST = 76
EXIT_STOPPED = 130  # 128 + SIGINT, as shells say it


class UserError(ValueError):
    """A mistake of whoever called: one sentence with what is wrong, the value got, what to do."""


class RunFailedError(RuntimeError):
    """The run cannot go on and a restart would not help: one sentence with the reason."""


class OutOfMemoryError(RuntimeError):
    """Memory ran out in the middle of a run: the attempt fails, the run may go on elsewhere."""


class RankLostError(RuntimeError):
    """Another rank has ended by itself: the attempt fails, the next one goes on."""


def name_known(given: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the likeliest meant, and all there are."""
    names = list(known)
    close = difflib.get_close_matches(given, names, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}known are {', '.join(names)}"
