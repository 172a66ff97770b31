"""Runs programs on this host and reports failures."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandFailed(RuntimeError):
    """The failure of a program; the message has its command line and its output."""


def run(
    *words: object, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> str:
    """Run a program, by default in this process's environment; return what it printed."""
    command = [str(word) for word in words]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise failure(command, done.returncode, done.stderr or done.stdout)
    return done.stdout


def failure(command: Sequence[str], status: int, output: str) -> CommandFailed:
    """Return the error of a command that ended with this status."""
    text = f"`{' '.join(command)}` ended with status {status}: {output.strip()}"
    return CommandFailed(text)
