"""The order of the measurements, their shares of the time, and the table of their results."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import REPOSITORY

# In order: the most doubtful first, those that may be cut short last. By name: the module in this
# folder, and the most seconds, so that one measurement leaves time for the others.
MEASUREMENTS: Mapping[str, tuple[str, float]] = {
    "machine": ("runs", 30.0),
    "equality": ("runs", 220.0),
    "steps": ("steps", 240.0),
    "speed": ("runs", 270.0),
}
# Too little time for any measurement.
_LEAST_SECONDS = 15.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("--cpu", action="store_true", help="a dry run without a GPU, tiny sizes")
    command.add_argument("--seconds", type=float, default=450.0, help="default: %(default)s")
    command.add_argument("--only", nargs="+", default=[], metavar="NAME", help="default: all")


def is_damaged(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether anything is wrong or could not be measured."""
    texts = [row["value"] + row["verdict"] for row in rows if row["what"] != "not deterministic"]
    return any(bad in text for text in texts for bad in ("FAILED", "DIFFERS"))


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the measurements one after another within `seconds`; return the table's rows."""
    seconds, cpu, only = given.seconds, given.cpu, given.only
    unknown = sorted(set(only) - set(MEASUREMENTS))
    if unknown:
        known = ", ".join(MEASUREMENTS)
        raise ValueError(f"unknown measurement {unknown[0]!r}; known: {known}")
    if not cpu and not torch.cuda.is_available():
        raise ValueError(
            "this machine has no GPU that torch can use; pass --cpu for a dry run, which tests "
            "only the benchmark itself"
        )
    deadline = time.monotonic() + seconds
    rows = []
    for name, (_, most) in MEASUREMENTS.items():
        if not only or name in only:
            # On a CPU, a measurement may use all the time: its figures are meaningless.
            left = deadline - time.monotonic()
            for row in _measured(name, left if cpu else min(left, most), cpu=cpu):
                print(f"{row['measured']}: {row['what']}: {row['value']}", file=sys.stderr)
                rows.append(row)
    return rows


def _measured(name: str, seconds: float, *, cpu: bool) -> Iterator[dict[str, Any]]:
    """Yield a measurement's rows as they come; if it fails, the last row says so."""
    if seconds < _LEAST_SECONDS:
        yield _row(name, "all", "skipped", "no time left")
        return
    command = [sys.executable, "-m", "benchmarks.gpu", name, f"--seconds={seconds:.0f}"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *(["--cpu"] if cpu else [])],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        # It keeps within its time by itself, unless it hangs.
        timer = threading.Timer(seconds + 10, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                yield _row(name, **json.loads(line))
        code, is_late = process.wait(), not timer.is_alive()
        timer.cancel()
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:] or ["no output"]
    if is_late:
        yield _row(name, "all", "stopped", f"not done after {seconds:.0f} s; raise --seconds")
    elif code != 0:
        is_lacking = "which is not installed" in last[0]
        what = "skipped" if is_lacking else f"FAILED: exit code {code}"
        yield _row(name, "all", what, last[0][-200:])


def _row(measured: str, what: str, value: str, verdict: str) -> dict[str, Any]:
    return {"measured": measured, "what": what, "value": value, "verdict": verdict}
