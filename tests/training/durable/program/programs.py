"""Runs of small programs, in this process or in one that may be killed, and what they leave."""

import gzip
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from contract.keys import LOGS
from tests.training.runs import KeptRun, wait_for
from training.cli.main import main
from training.durable.program.process import ProgramProcess
from training.durable.record.head import Head
from training.durable.record.history import History

ROOT = Path(__file__).parents[4]
SECONDS = 60.0

# Counts to --steps, and keeps the count after every second step; it says when, if it --commits.
COUNTER = """
    import argparse, json, os, sys, time
    from pathlib import Path
    from training.program import commit
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--commits", type=int, default=0)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR"))
    parser.add_argument("--folder", default=os.environ.get("SM_CHECKPOINT_DIR"))
    options = parser.parse_args()
    state = Path(options.folder, "state.json")
    step = json.loads(state.read_text())["step"] if state.exists() else 0
    print(f"begins after {step}")
    while step < options.steps:
        step += 1
        time.sleep(options.pause)
        print(f"step={step} loss={1 / step}")
        if step % 2 == 0:
            part = state.with_suffix(".part")
            part.write_text(json.dumps({"step": step}))
            part.replace(state)
            if options.commits:
                commit()
    Path(options.model_dir, "model.json").write_text(json.dumps({"step": step}))
"""
# For a run that a test takes away: it goes on for as long as that takes.
ENDLESS = ("--hyperparameter=steps=100000", "--hyperparameter=pause=0.1")
COMMITS = "--hyperparameter=commits=1"
METRICS = ("--metric=step=step=([0-9]+)", "--metric=loss=loss=([0-9.e-]+)")


@dataclass
class ProgramRun(KeptRun):
    """One run of a program below a folder, attempt by attempt."""

    folder: Path
    uri: str
    options: list[str] = field(default_factory=list)

    def write(self, source: str, name: str = "train.py") -> Path:
        """Write a file of the source folder."""
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source).lstrip())
        return path

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def root(self) -> Path:
        return self.folder / "ml"

    @property
    def history(self) -> History:
        return History.read(self.store)

    def arguments(self, *more: str, command: str = "python train.py") -> list[str]:
        return [
            "run",
            f"--program={command}",
            f"--source={self.source}",
            f"--run-uri={self.uri}",
            f"--ml-root={self.root}",
            f"--scratch={self.folder / secrets.token_hex(4)}",
            "--quiet-seconds=0.2",
            "--lease-ttl-seconds=0.6",
            *self.options,
            *more,
        ]

    def attempt(self, *more: str, command: str = "python train.py") -> int:
        """Run an attempt in this process."""
        return main(self.arguments(*more, command=command))

    def spawn(self, *more: str, command: str = "python train.py") -> "subprocess.Popen[str]":
        """Start an attempt in an interpreter of its own; its output goes to a pipe."""
        words = self.arguments(*more, command=command)
        return subprocess.Popen(
            [sys.executable, "-m", "training", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def log(self, generation: int) -> str:
        """What the program printed in an attempt."""
        parts = [k for k in self.store.sizes(LOGS) if k.startswith(f"{LOGS}{generation:04d}-")]
        found = (self.store.get(key) for key in parts)
        return b"".join(gzip.decompress(one.data) for one in found if one).decode()

    def wait_for_snapshots(self, count: int) -> None:
        """Wait until the head names this many, or later ones."""

        def are_there() -> bool:
            head = Head.read(self.store)
            return head is not None and any(e.step >= count for e in head.checkpoints)

        wait_for(are_there)


def kill(process: "subprocess.Popen[str]") -> None:
    """Take the supervisor away, as a lost machine does."""
    process.kill()
    process.communicate()


def tell(process: "subprocess.Popen[str]", number: int = signal.SIGUSR1) -> str:
    """Send a notice (or a shutdown) and return what was printed until the end."""
    os.kill(process.pid, number)
    return process.communicate(timeout=SECONDS)[0]


def is_running(word: str) -> bool:
    """Whether a process has this word in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


@contextmanager
def started(*words: str, folder: Path = ROOT) -> Iterator[ProgramProcess]:
    with Path(os.devnull).open("wb") as output:
        process = ProgramProcess(
            words, folder=folder, variables=dict(os.environ), output=output.fileno()
        )
    try:
        yield process
    finally:
        process.close()
