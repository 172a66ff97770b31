"""The trainer's exit codes, as its systemd unit and other programs read them, and UserError."""

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER = 2  # a UserError: a restart would not help
EXIT_NO_MANIFEST = 3
EXIT_MACHINE = 4  # this machine cannot go on; another one can
EXIT_STORE = 74  # the store failed: a restart may help, and the place of the failure means nothing
EXIT_INTERRUPTED = 75  # saved: another machine resumes
EXIT_LEASE_LOST = 76
EXIT_CONFIG = 78  # of a boot step: it would fail on any machine
EXIT_STOPPED = 130  # 128 + SIGINT, as in shells


class UserError(ValueError):
    """A caller's mistake: one sentence that says what is wrong, the value got and what to do."""
