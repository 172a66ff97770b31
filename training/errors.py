"""The two ways to end without a result that are nobody's bug, with their exit codes."""

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_NO_MANIFEST = 3
EXIT_INTERRUPTED = 75
EXIT_LEASE_LOST = 76


class UserError(ValueError):
    """A mistake of whoever called: one sentence with what is wrong, the value got, what to do."""


class RunFailedError(RuntimeError):
    """The run cannot go on and a restart would not help: one sentence with the reason."""


class OutOfMemoryError(RuntimeError):
    """Memory ran out in the middle of a run: the attempt fails, the run may go on elsewhere."""
