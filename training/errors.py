"""Expected failures, which are no bugs, and the exit codes of a command."""

import difflib
from collections.abc import Iterable

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_NO_MANIFEST = 3
EXIT_INTERRUPTED = 75
EXIT_LEASE_LOST = 76
EXIT_STOPPED = 130  # 128 + SIGINT, the convention of shells


class UserError(ValueError):
    """A user's mistake: one sentence with what is wrong, the value got and what to do."""


class RunFailedError(RuntimeError):
    """The run cannot continue and a restart would not help: one sentence with the reason."""


class OutOfMemoryError(RuntimeError):
    """Memory ran out in mid-run: the attempt fails, the run may continue on another machine."""


class RankLostError(RuntimeError):
    """Another rank exited by itself: the attempt fails, the next one resumes the run."""


def name_known(given: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the closest match, and all known names."""
    names = list(known)
    close = difflib.get_close_matches(given, names, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}known are {', '.join(names)}"
