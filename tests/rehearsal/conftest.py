"""Rehearsals as people start them, and stop them."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rehearsal.demo.deployment import processes_below

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


def machines_below(folder: Path) -> list[psutil.Process]:
    """List the processes of process machines, and the systemd-nspawn of others, below a folder."""
    found = processes_below(folder)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(word.startswith(f"--directory={folder}/") for word in process.cmdline()):
                found.append(process)
    return found


@pytest.fixture
def stop_once_a_machine_runs() -> Callable[[subprocess.Popen[str], Path], str]:
    """Return a function that presses Ctrl-C twice when a machine runs below a folder.

    It returns what the rehearsal has said, which left nothing running.
    """

    def stop(process: subprocess.Popen[str], folder: Path) -> str:
        deadline = time.monotonic() + 1200
        while not machines_below(folder) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.2)
        assert machines_below(folder)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)  # as impatient people do
        _, said = process.communicate(timeout=120)
        assert process.returncode == 130
        assert "Traceback" not in said
        assert machines_below(folder) == []
        return said

    return stop
