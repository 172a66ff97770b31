"""A finished run as `sizing review` and `advise` read it: receipt, config and metrics.

Reads a run's folder (a local one, or downloaded from the run bucket) or its receipt alone.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from contract.keys import CONFIG, RECEIPT


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """What happened, as far as the files say; None where they do not."""

    run_id: str
    workload: str
    recipe: str
    state: str
    device: str
    size: str | None
    seconds: float
    generations: int
    checkpoint_bytes: int
    step_seconds: Mapping[str, float]
    prepare_seconds: float | None
    save_seconds: float | None
    data_wait: float | None
    peak_gpu_bytes: int | None
    usd: float | None
    prediction: Mapping[str, float]

    @property
    def interruptions(self) -> int:
        """The number of generations after the first: each took over from an interrupted one."""
        return max(0, self.generations - 1)

    def signals(self) -> dict[str, float]:
        """Return the signals that the rules of sizing/plan/triggers.py know."""
        found = {"hours_per_experiment": self.seconds / 3600}
        if self.data_wait is not None:
            found["data_wait_percent"] = 100 * self.data_wait
        return found


def read_run(path: Path) -> FinishedRun:
    """Read a run's folder or receipt; anything else is a ValueError."""
    receipt_file = path / RECEIPT if path.is_dir() else path
    receipt = _read(receipt_file)
    for name in ("run_id", "workload", "recipe", "seconds"):
        if name not in receipt:
            raise ValueError(f"{receipt_file} is not a receipt: it has no {name!r}")
    folder = receipt_file.parent
    config = _read(folder / CONFIG) if (folder / CONFIG).exists() else {}
    lines = list(_metrics(folder / "metrics"))
    steps = [line for line in lines if line.get("kind") == "step"]
    commits = [line for line in lines if line.get("kind") == "commit"]
    prepared = [line for line in lines if line.get("kind") == "prepare"]
    if any(line.get("shared") for line in prepared):
        prepared = []  # what another run prepared says nothing about the cost
    prediction = receipt.get("prediction") or config.get("prediction") or {}
    waits = [float(line["data_wait"]) for line in steps if line.get("data_wait") is not None]
    return FinishedRun(
        run_id=str(receipt["run_id"]),
        workload=str(receipt["workload"]),
        recipe=str(receipt["recipe"]),
        state=str(receipt.get("state", "finished")),
        device=str((receipt.get("numerics_key") or {}).get("device", "unknown")),
        size=_text(prediction.get("size")),
        seconds=float(receipt["seconds"]),
        generations=int(receipt.get("generations", 1)),
        checkpoint_bytes=int(receipt.get("checkpoint_bytes", 0)),
        step_seconds=_step_seconds(steps),
        prepare_seconds=sum(float(line["seconds"]) for line in prepared) if prepared else None,
        save_seconds=median(float(c["seconds"]) for c in commits) if commits else None,
        data_wait=median(waits) if waits else None,
        peak_gpu_bytes=receipt.get("peak_gpu_bytes"),
        usd=receipt.get("usd"),
        prediction={name: v for name, v in prediction.items() if isinstance(v, int | float)},
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; give a run's folder or its receipt.json") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a receipt: it is not a JSON object")
    return found


def _metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield all lines of all attempts, skipping a line cut off by a kill."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _step_seconds(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of an optimizer step by stage, from samples and their rate."""
    found: dict[str, list[float]] = {}
    for line in steps:
        rate, ids = line.get("samples_per_second"), line.get("ids")
        if rate and ids:
            found.setdefault(str(line["stage"]), []).append(len(ids) / float(rate))
    return {stage: median(values) for stage, values in found.items()}
