"""How accurate the models are: predictions beside runs that others measured and published.

The rows of ground_truths.csv whose role is `calibrates` were used to fit the step-time constants
(`fit` does it again); the model has never seen the others. Misses stay in the table.
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sizing.catalogue.gpus import find_gpu
from sizing.models.constants import MIB, Constants
from sizing.models.step_time import roofline

TRUTHS_FILE = Path(__file__).with_name("ground_truths.csv")
MODELS_FILE = Path(__file__).with_name("ground_truth_models.json")
# Reads gradients, reads and writes parameters and state; SGD has one state, AdamW two (float32).
OPTIMIZER_BYTES: Mapping[str, tuple[int, int]] = {"sgd": (20, 4), "adamw": (28, 8)}
# The batch sizes that timm's benchmark tries, downwards, until one fits.
LADDER = (512, 384, 256, 192, 128, 96, 64)
THROUGHPUT_LIMIT, MEMORY_LIMIT, RANKING_LIMIT = 0.30, 0.15, 0.90


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """One published measurement; `role` says whether the model was fitted to it."""

    name: str
    kind: str
    role: str
    model: str
    gpu: str
    precision: str
    optimizer: str
    batch: int
    measured: float
    unit: str
    source: str

    @property
    def is_timm(self) -> bool:
        """Whether it is a row of timm's table: those are ranked, their batch is from a ladder."""
        return self.gpu == "NVIDIA RTX 3090"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A truth beside its prediction; `ratio` is predicted / measured."""

    name: str
    kind: str
    role: str
    measured: float
    predicted: float | None
    unit: str
    limit: float
    source: str

    @property
    def ratio(self) -> float | None:
        """Predicted / measured."""
        return None if self.predicted is None else self.predicted / self.measured

    @property
    def is_hit(self) -> bool | None:
        """Whether the prediction is within the limit; None without a prediction."""
        return None if self.ratio is None else abs(self.ratio - 1) <= self.limit


@cache
def truths() -> tuple[Truth, ...]:
    """Return all rows of the file."""
    with TRUTHS_FILE.open(newline="", encoding="utf-8") as lines:
        return tuple(
            Truth(
                **{
                    **row,
                    "batch": int(row["batch"]),
                    "measured": float(row["measured"]),
                }  # type: ignore[arg-type]
            )
            for row in csv.DictReader(lines)
        )


@cache
def counts() -> Mapping[str, Mapping[str, Any]]:
    """Return what `python -m benchmarks.anchor_footprints` counted, by model."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(MODELS_FILE.read_text(encoding="utf-8"))[
        "models"
    ]
    return found


def _kept_bytes(truth: Truth) -> float:
    """Return one sample's kept bytes in the run's precision: twice those counted in half."""
    count = counts()[truth.model]
    wide = truth.precision in ("float32", "tf32") and count["counted_in"] == "float16"
    return float(count["kept_bytes_per_sample"]) * (2 if wide else 1)


def samples_per_second(truth: Truth, constants: Constants) -> float:
    """Return the throughput that the step-time model predicts."""
    count = counts()[truth.model]
    step = roofline(
        samples=truth.batch,
        flops_per_sample=count["flops_per_sample"],
        kept_bytes_per_sample=_kept_bytes(truth),
        optimizer_traffic_bytes=count["parameters"] * OPTIMIZER_BYTES[truth.optimizer][0],
        launches_seconds=count["kernels_per_step"] * constants.seconds_per_kernel,
        precision=truth.precision,
        gpu=find_gpu(truth.gpu),
        constants=constants,
    )
    return truth.batch / step.seconds


def allocated_bytes(truth: Truth, batch: int) -> float:
    """Return what max_memory_allocated would report: parameters to kept activations, in bytes."""
    count = counts()[truth.model]
    half_copies = 2 if truth.precision in ("float16", "bfloat16") else 0
    trainable = float(count.get("trainable_parameters", count["parameters"]))
    fixed = float(count["parameters"]) * (4 + half_copies)
    fixed += trainable * (4 + OPTIMIZER_BYTES[truth.optimizer][1])
    return fixed + batch * _kept_bytes(truth)


def needed_mib(truth: Truth, batch: int, constants: Constants) -> float:
    """Return the MiB that must be free on the GPU, as in sizing/models/memory.py."""
    allocated = allocated_bytes(truth, batch) / MIB
    return float(allocated) * (1 + constants.fragmentation_share) + constants.context_mib


def largest_batch(truth: Truth, constants: Constants) -> int:
    """Return the largest batch of the ladder that fits the run's GPU; 0 if none does."""
    there = find_gpu(truth.gpu).memory_mib
    return next((b for b in LADDER if needed_mib(truth, b, constants) <= there), 0)


def ladder_error(truth: Truth, constants: Constants) -> float:
    """Return the relative error of the memory model that would explain the batch that was used.

    The batch used did fit and the ladder's next larger one did not: 0 if the prediction agrees
    with both.
    """
    there = find_gpu(truth.gpu).memory_mib
    too_much = needed_mib(truth, truth.batch, constants) / there - 1
    place = LADDER.index(truth.batch)
    too_little = 0.0
    if place > 0:
        too_little = 1 - needed_mib(truth, LADDER[place - 1], constants) / there
    return max(0.0, too_much, too_little)


def rows(constants: Constants | None = None) -> list[Row]:
    """Return predicted throughput or memory beside each truth."""
    used = constants or Constants()
    return [_row(truth, used) for truth in truths()]


def _row(truth: Truth, constants: Constants) -> Row:
    predicted = None
    if truth.model and truth.kind == "throughput" and truth.role != "not predictable":
        predicted = samples_per_second(truth, constants)
    elif truth.model and truth.kind == "memory":
        predicted = needed_mib(truth, truth.batch, constants) * MIB / 1e9
    return Row(
        name=truth.name,
        kind=truth.kind,
        role=truth.role,
        measured=truth.measured,
        predicted=predicted,
        unit=truth.unit,
        limit=MEMORY_LIMIT if truth.kind == "memory" else THROUGHPUT_LIMIT,
        source=truth.source,
    )


def ranking(ranked: Sequence[Truth], constants: Constants | None = None) -> float:
    """Return Spearman's correlation of predicted and measured throughput."""
    used = constants or Constants()
    return spearman(
        [truth.measured for truth in ranked],
        [samples_per_second(truth, used) for truth in ranked],
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences without ties."""
    ranks = [
        [sorted(values).index(value) for value in values] for values in (list(one), list(other))
    ]
    distance = float(sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)))
    return 1 - 6 * distance / (len(one) * (len(one) ** 2 - 1))


def fit() -> dict[str, float]:
    """Fit the step-time constants to the calibrating rows: least sum of |log error|.

    half_time_factor is bounded by 1: nothing is faster than the best measured matrix product.
    """
    of_images = [t for t in truths() if t.role == "calibrates" and t.precision == "float16"]
    steps = [(1 + a / 50, 4 + b / 5) for a in range(51) for b in range(81)]

    def error(pair: tuple[float, float]) -> float:
        constants = Constants(half_time_factor=pair[0], traffic_passes=pair[1])
        return sum(abs(math.log(samples_per_second(t, constants) / t.measured)) for t in of_images)

    half, passes = min(steps, key=error)
    wide = [t for t in truths() if t.role == "calibrates" and t.precision == "float32"]

    def wide_error(factor: float) -> float:
        constants = Constants(float32_time_factor=factor, traffic_passes=passes)
        return sum(abs(math.log(samples_per_second(t, constants) / t.measured)) for t in wide)

    single = min((1 + a / 50 for a in range(101)), key=wide_error)
    return {
        "half_time_factor": round(half, 2),
        "traffic_passes": round(passes, 1),
        "float32_time_factor": round(single, 2),
    }
