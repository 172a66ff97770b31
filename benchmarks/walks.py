"""The files and functions of ours that a start, a save, a resume and a notice run through.

A profile function in every thread records called functions while a small run trains in this
process. Code that reads and records the last step's numbers is left out, as it runs at every step.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks import REPOSITORY
from benchmarks.house import room_of
from training import main

# The functions with which a walk starts or ends: the end of a file's name, and the function.
TRAINS = ("loop.py", "run")
STEPS = ("learner.py", "step")
READS = ("loop.py", "_read")
SAVES = ("policy.py", "save_if_due")
HEARS = ("policy.py", "answer_notice")
WORKLOAD = "training.proof.torture.small_workload:SMALL"
_WRITERS = ("save", "transfer")
_CODE_OF_FUNCTIONS = 2  # CO_NEWLOCALS: neither a module's body nor a class's
_NOTICE_AT_STEP = 8

Walk = set[tuple[str, str]]


class Tracer:
    """Collects the walks of one attempt."""

    def __init__(self, *, notice_at_step: int | None = None) -> None:
        self.walks: dict[str, Walk] = defaultdict(set)
        self._main = threading.current_thread()
        self._notice_at_step = notice_at_step
        self._num_steps = 0
        self._is_starting = True
        self._has_notice = False
        self._depth = {SAVES: 0, READS: 0}
        self._saving: Walk = set()  # functions at this boundary, and in writing threads since
        self._has_saved = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call or return, for functions of this repository only."""
        code = frame.f_code
        name = self._name_of(code)
        if name is None or event not in ("call", "return"):
            return
        if threading.current_thread() is not self._main:
            if event == "call" and threading.current_thread().name in _WRITERS:
                self._saving.add(name)
            if event == "call" and self._has_notice:
                self.walks["notice"].add(name)
            return
        for entry in self._depth:
            self._depth[entry] += (1 if event == "call" else -1) if is_entry(code, entry) else 0
        if event == "return":
            if is_entry(code, SAVES):
                self._has_saved = bool(argument)
            return
        self._enter(code, name)

    def _enter(self, code: CodeType, name: tuple[str, str]) -> None:
        if is_entry(code, SAVES):
            if self._has_saved:
                # The last save counts: the first also allocates memory for copies.
                self.walks["save"] = self._saving
            self._saving, self._has_saved = set(), False
        self._is_starting = self._is_starting and not is_entry(code, TRAINS)
        self._has_notice = self._has_notice or is_entry(code, HEARS)
        if is_entry(code, STEPS):
            self._num_steps += 1
            if self._num_steps == self._notice_at_step:
                os.kill(os.getpid(), signal.SIGUSR1)
        if self._is_starting:
            self.walks["start"].add(name)
        if self._depth[READS]:
            return
        if self._depth[SAVES]:
            self._saving.add(name)
        if self._has_notice:
            self.walks["notice"].add(name)

    @staticmethod
    def _name_of(code: CodeType) -> tuple[str, str] | None:
        path = Path(code.co_filename)
        if not code.co_flags & _CODE_OF_FUNCTIONS or REPOSITORY not in path.parents:
            return None
        file = path.relative_to(REPOSITORY)
        is_ours = file.parts[0] in ("training", "contract") and "torture" not in file.parts
        return (file.as_posix(), code.co_qualname) if is_ours else None


def is_entry(code: CodeType, entry: tuple[str, str]) -> bool:
    """Whether this is the function with that name in a file with that ending."""
    return code.co_name == entry[1] and code.co_filename.endswith(f"/{entry[0]}")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add nothing: the run is always the same."""


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per walk."""
    with tempfile.TemporaryDirectory(prefix="walks-") as folder, redirect_stdout(sys.stderr):
        data = f"--out={folder}/data"
        assert main(["data", "make", f"--workload={WORKLOAD}", data, "--count=77"]) == 0
        run = ["run", f"--workload={WORKLOAD}", "--recipe=plain", "--lease-ttl-seconds=1"]
        run += [f"--dataset-uri={folder}/data", f"--run-uri={folder}/run"]
        run += ["--checkpoint-interval=2steps"]
        first = _trace(main, run, 75, Tracer(notice_at_step=_NOTICE_AT_STEP))
        second = _trace(main, run, 0, Tracer())
    walks = {
        "start of a run": first["start"],
        "periodic save": second["save"],
        "notice to exit 75": first["notice"],
        "start of a resume": second["start"],
    }
    return [row(name, walk) for name, walk in walks.items()]


def row(name: str, walk: Walk) -> dict[str, Any]:
    """Describe a walk: its files in all and by room, its functions, the files' names."""
    files = sorted({file for file, _ in walk})
    rooms = Counter(map(room_of, files)).most_common()
    return {
        "walk": name,
        "files": len(files),
        "by room": ", ".join(f"{room} {num}" for room, num in rooms),
        "functions": len(walk),
        "names": " ".join(files),
    }


def _trace(
    main: Callable[[list[str]], int], arguments: list[str], code: int, tracer: Tracer
) -> dict[str, Walk]:
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        assert main(arguments) == code
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return tracer.walks
