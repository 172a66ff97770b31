"""Runs the host's programs."""

import subprocess


class CommandFailed(RuntimeError):
    """A program of the host failed; the message has its words and what it said."""


def run(*words: object) -> str:
    """Run a program; return what it printed."""
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise CommandFailed(f"`{' '.join(command)}` ended with status {done.returncode}: {said}")
    return done.stdout
