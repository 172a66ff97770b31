"""The common parts of measurements: the device, the time left, rows, and runs of the trainer."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import REPOSITORY

# Makes the phases after the dense one as short and small as possible.
_BRIEF = {
    "num_experts": 2,
    "width_factor": 1,
    "new_layers": 1,
    "experts_steps": 1,
    "grown_steps": 1,
}
# About 20 million parameters in the dense phase; in a dry run the laptop recipe's 100 thousand.
_SIZES = {"width": 512, "num_heads": 8, "num_layers": 6, "hidden": 2048, "context": 256}
# The first steps of a stage choose kernels and fill caches.
_WARM_SHARE = 0.4
# The time limit of one run of the trainer.
_RUN_SECONDS = 200.0


@dataclass(kw_only=True)
class Session:
    """One measurement: prints its rows as JSON lines as they come."""

    device: torch.device
    folder: Path
    deadline: float  # by the monotonic clock
    _datasets: dict[tuple[str, int], Path] = field(default_factory=dict)

    @property
    def is_dry(self) -> bool:
        """Whether this is a dry run, without a GPU and with tiny sizes."""
        return self.device.type == "cpu"

    @property
    def seconds_left(self) -> float:
        """The seconds until the measurement must be over."""
        return self.deadline - time.monotonic()

    def row(self, what: str, value: object, verdict: str = "") -> None:
        """Print a row of the table."""
        print(json.dumps({"what": what, "value": str(value), "verdict": verdict}), flush=True)

    def growth(self, **overrides: object) -> dict[str, object]:
        """Return overrides of growth's laptop recipe that leave one phase worth measuring."""
        sizes = {} if self.is_dry else {**_SIZES, "precision": "bfloat16"}
        return {**_BRIEF, **sizes, **overrides}

    def dataset(self, workload: str, count: int) -> Path:
        """Return the folder of a dataset, which is made once."""
        if (workload, count) not in self._datasets:
            out = self.folder / f"data-{len(self._datasets)}"
            made = [f"--workload={workload}", f"--count={count}", f"--out={out}"]
            code = self.training(["data", "make", *made], self.folder / "data.log")
            if code != 0:
                raise RuntimeError(f"the dataset: {last_line(self.folder / 'data.log')}")
            self._datasets[workload, count] = out
        return self._datasets[workload, count]

    def ask(self, name: str, command: Sequence[str], **options: Any) -> Any:
        """Return the JSON that ends another process's output; raise RuntimeError if it fails."""
        log = self.folder / f"{name}.log"
        with log.open("w") as errors:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=max(10.0, self.seconds_left),
                check=False,
                **options,
            )
        if done.returncode != 0:
            raise RuntimeError(f"{name}: {last_line(log)}")
        return json.loads(done.stdout.splitlines()[-1])

    def run_options(self, name: str, workload: str, recipe: str, dataset: Path) -> list[str]:
        """Return the command of the run called `name`, without its overrides."""
        return [
            *("run", f"--workload={workload}", f"--recipe={recipe}", f"--dataset-uri={dataset}"),
            *(f"--run-uri={self.folder / name}", f"--artifacts-uri={self.folder / 'artifacts'}"),
            f"--metrics-file={metrics_file(self.folder, name)}",
        ]

    def training(self, arguments: list[str], log: Path) -> int | None:
        """Run the trainer; return its exit code, or None if it had to be killed."""
        command = [sys.executable, "-m", "training", *arguments]
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return process.wait(min(_RUN_SECONDS, max(5.0, self.seconds_left)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def override_options(overrides: Mapping[str, object]) -> list[str]:
    """Return overrides as options of the trainer."""
    return [
        f"--override={field}={str(value).lower() if isinstance(value, bool) else value}"
        for field, value in overrides.items()
    ]


def metrics_file(folder: Path, name: str) -> Path:
    """Return the path of a run's metrics."""
    return folder / f"{name}.jsonl"


def steps_of(folder: Path, name: str, stage: str | None = None) -> list[dict[str, Any]]:
    """Return the steps that a run has recorded so far."""
    path = metrics_file(folder, name)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [x for x in found if x["kind"] == "step" and stage in (None, x["stage"])]


def rate_of(folder: Path, name: str, stage: str) -> tuple[float, float]:
    """Return a stage's median samples per second, and its steps' share of waiting for data."""
    found = steps_of(folder, name, stage)
    warm = found[int(len(found) * _WARM_SHARE) :]
    if not warm:
        return float("nan"), float("nan")
    rates, waits = ([x[key] for x in warm] for key in ("samples_per_second", "data_wait"))
    return statistics.median(rates), statistics.median(waits)


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(errors="replace").replace("\r", "\n").strip().splitlines()
    return lines[-1][-200:] if lines else "no output"
