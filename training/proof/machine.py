"""A program on its own machine: a process with a new root, lost when its moment has come."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def run_command(machine: Path, run_uri: str, options: Sequence[str]) -> list[str]:
    """`python -m training run` with these options, its files below the machine's folder."""
    return [
        *(sys.executable, "-m", "training", "run", *options, f"--run-uri={run_uri}"),
        *(f"--ml-root={machine / 'ml'}", f"--scratch={machine}", "--lease-ttl-seconds=1"),
    ]


def live(
    command: Sequence[str],
    log: Path,
    *,
    is_lost: Callable[[], bool] = lambda: False,
    began: Callable[[int], None] = lambda pid: None,
    poll_seconds: float = 0.1,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Run a command until it ends, or until the machine `is_lost` with all of its processes.

    `began` gets the process's id. Return the exit code, or minus the signal's number; the output is
    added to the log.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    try:
        began(process.pid)
        while process.poll() is None and not is_lost():
            time.sleep(poll_seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def recorded(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines that a run has written to its metrics file, except a half-written one."""
    text = metrics.read_text(errors="replace") if metrics.exists() else ""
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
