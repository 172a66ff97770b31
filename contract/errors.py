"""The trainer's exit codes, as its systemd unit and other programs read them, and UserError."""

from enum import IntEnum


class Exit(IntEnum):
    """How a process of the trainer ended."""

    FINISHED = 0
    FAILED = 1
    USER = 2  # a UserError: a restart would not help
    NO_MANIFEST = 3
    MACHINE = 4  # this machine cannot go on; another one can
    STORE = 74  # the store failed: a restart may help, and the place of the failure means nothing
    INTERRUPTED = 75  # saved: another machine resumes
    LEASE_LOST = 76
    CONFIG = 78  # of a boot step: it would fail on any machine
    STOPPED = 130  # 128 + SIGINT, as in shells


class UserError(ValueError):
    """A caller's mistake: one sentence that says what is wrong, the value got and what to do."""
