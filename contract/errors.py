"""The trainer's exit codes, as its systemd unit and other programs read them, and UserError."""

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USER = 2  # a UserError: a restart would not help
EXIT_NO_MANIFEST = 3
EXIT_MACHINE = 4  # this machine cannot go on: another one does
EXIT_STORE = 74  # the store failed: a restart may help, and where it failed means nothing
EXIT_INTERRUPTED = 75  # saved: another machine resumes
EXIT_LEASE_LOST = 76
EXIT_CONFIG = 78  # of a boot step: no other machine could do better
EXIT_STOPPED = 130  # 128 + SIGINT, as shells say it


class UserError(ValueError):
    """A caller's mistake: one sentence with what is wrong, the value got, what to do."""
