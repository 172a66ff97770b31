"""Rehearsals as people start them, and stop them."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The arguments of `python -m rehearsal`.
Rehearse = Callable[..., subprocess.Popen[str]]
REPOSITORY = Path(__file__).parents[2]


def start_python(*arguments: str) -> subprocess.Popen[str]:
    """Start a Python program of this repository, whose output is kept for the test."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def rehearse() -> Iterator[Rehearse]:
    """Return a function that starts a rehearsal; none outlives a test that fails."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(start_python("-m", "rehearsal", *arguments))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
