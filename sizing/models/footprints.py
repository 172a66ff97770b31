"""Footprints: the needs of one step of a stage, as counted by `python -m training measure`.

Reads sizing/footprints.json. Between two counted micro-batches it interpolates, beyond them it
extrapolates from the last two; both say "modelled". Others are refused with the command to run.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from contract.suggestion import suggest
from contract.trainer_options import RANKS
from sizing.figures import Basis

FOOTPRINTS_FILE = Path(__file__).parent.parent / "footprints.json"
MEASURE = "python -m training measure"
# Up to this many times the largest counted micro-batch, extrapolating is still sound.
_MOST_EXTENSION = 16
# Fields that grow with the micro-batch; "usual" applies where batches differ in size.
_BYTES = (
    *("peak_bytes", "backward_peak_bytes", "usual_peak_bytes"),
    *("peak_activation_bytes", "output_bytes"),
)
FOOTPRINTS_FORMAT = 2


class NotMeasuredError(ValueError):
    """A workload or recipe has no footprints, so nothing can be predicted about it yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Epochs of a stage whose samples take `work` times a counted one's, as at one resolution."""

    name: str
    epochs: float
    work: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """One stage at one micro-batch, in bytes; a Prepare stage has no gradients or optimizer."""

    stage: str
    kind: Literal["prepare", "train"]
    micro_batch: int
    global_batch: int
    precision: str = "float32"
    samples_per_epoch: int
    epochs: float  # a stage of steps may end within one
    steps_per_epoch: int
    validation_samples: int = 0
    first_files: int | None = None  # that the first step reads; None: it needs all of the dataset
    evaluations: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    gathered_bytes: int = 0  # parameters gathered at once where GPUs share them
    peak_bytes: int
    backward_peak_bytes: int | None = None  # without the optimizer's need
    usual_peak_bytes: int | None = None  # where batches differ: the peak of an average one
    activation_bytes: int
    output_bytes: int = 0
    checkpoint_bytes: int = 0
    flops_per_sample: float
    kept_bytes_per_sample: float
    kernels: int
    convolution_share: float = 0.0
    grouped_share: float = 0.0
    channels_last: bool
    basis: Basis
    source: str
    # The differences between epochs; without phases all are like the counted step.
    phases: tuple[Phase, ...] = ()
    evaluation_work: float = 1.0
    exchanged_bytes: float | None = None  # per micro-batch; None: gradients, once a step

    @property
    def all_phases(self) -> tuple[Phase, ...]:
        """The epochs by the work of a sample; a stage where it stays the same has one."""
        return self.phases or (Phase(name="", epochs=self.epochs, work=1.0),)

    @property
    def aside_bytes(self) -> int:
        """Sums of gradients that wait on one GPU until others are added to them.

        training/engine/reduction.py; a sharded model keeps none, each gradient is reduced at once.
        """
        num_micro = math.ceil(self.global_batch / self.micro_batch)
        return min(3, max(0, math.ceil(math.log2(num_micro)) - 1)) * self.gradient_bytes

    def sharded(self, gpus: int) -> "Footprint":
        """Return it with parameters, gradients and optimizer spread over `gpus`, as FSDP does."""
        less = 1 - 1 / gpus
        # The block at work and the next one have all their parameters gathered.
        whole = min(self.gathered_bytes, self.parameter_bytes)
        is_summed = self.global_batch > self.micro_batch
        fixed = self.optimizer_bytes + is_summed * self.gradient_bytes
        gone = less * (self.parameter_bytes - whole + fixed) + self.aside_bytes
        largest, usual = self.backward_peak_bytes or self.peak_bytes, self.usual_peak_bytes
        # While the optimizer works, nothing is gathered.
        peak = round(max(largest - gone, self.peak_bytes / gpus))
        return replace(
            self,
            parameter_bytes=round(self.parameter_bytes / gpus),
            gradient_bytes=round(self.gradient_bytes / gpus),
            optimizer_bytes=round(self.optimizer_bytes / gpus),
            peak_bytes=peak,
            usual_peak_bytes=None if usual is None else round(max(usual - gone, usual / gpus)),
            # Gathered for forward and for backward, and gradients scattered: halves of an exchange.
            exchanged_bytes=self.parameter_bytes + self.gradient_bytes / 2,
        )

    @property
    def largest_over_usual(self) -> float:
        """The ratio of the largest batch to the usual one, by the memory that a step holds."""
        if self.usual_peak_bytes is None:
            return 1.0
        fixed = self.parameter_bytes + self.optimizer_bytes
        return (self.peak_bytes - fixed) / max(1, self.usual_peak_bytes - fixed)


@cache
def load(path: Path = FOOTPRINTS_FILE) -> tuple[dict[str, Any], ...]:
    """Return all footprints of the file, unchanged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotMeasuredError(f"{path} does not exist; create it with `{MEASURE}`") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); create it again with `{MEASURE}`"
        ) from error
    if isinstance(content, dict) and content.get("format") != FOOTPRINTS_FORMAT:
        raise ValueError(
            f"{path} has format {content.get('format')!r}, this version reads {FOOTPRINTS_FORMAT}; "
            f"create it again with `{MEASURE}`"
        )
    rows = content.get("footprints") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"workload", "recipe"} <= row.keys() for row in rows
    ):
        raise ValueError(f"{path} has no list of footprints; create it again with `{MEASURE}`")
    return tuple(rows)


def recipes(path: Path = FOOTPRINTS_FILE) -> dict[str, list[str]]:
    """Return each workload's measured recipes."""
    found: dict[str, dict[str, None]] = {}
    for row in load(path):
        found.setdefault(row["workload"], {})[row["recipe"]] = None
    return {workload: list(names) for workload, names in found.items()}


def counted_stages(
    workload: str,
    recipe: str,
    *,
    micro_batch: int | None = None,
    batch: int | None = None,
    path: Path = FOOTPRINTS_FILE,
) -> tuple[Footprint, ...]:
    """Return the stages of a recipe in order, at its own batch and micro-batch or given ones."""
    known = recipes(path)
    if workload not in known:
        raise NotMeasuredError(_unknown("workload", workload, list(known), workload, recipe))
    if recipe not in known[workload]:
        raise NotMeasuredError(_unknown("recipe", recipe, known[workload], workload, recipe))
    rows = [r for r in load(path) if (r["workload"], r["recipe"]) == (workload, recipe)]
    names = list(dict.fromkeys(row["stage"] for row in rows))
    trained = [row["recipe_micro_batch"] for row in rows if row["kind"] == "train"]
    return tuple(
        _stage(
            of_stage,
            # A stage with a batch of its own (not the last stage's) keeps it.
            micro_batch if of_stage[0].get("recipe_micro_batch") == trained[-1] else None,
        )
        for of_stage in (_of_batch(rows, name, batch) for name in names)
    )


def trained_samples(stages: Sequence[Footprint]) -> int:
    """Return how many samples of the dataset the stages train; a Prepare stage reads more."""
    return max(stage.samples_per_epoch for stage in stages if stage.kind == "train")


def are_busy(stages: Sequence[Footprint], gpus: int) -> bool:
    """Whether each of so many GPUs has a micro-batch of every step, and gradients to add up.

    A rank without one is not started; without the other each would train a model of its own.
    """
    trained = [stage for stage in stages if stage.kind == "train"]
    busy = all(s.gradient_bytes and s.micro_batch * gpus <= s.global_batch for s in trained)
    return gpus == 1 or busy


def usable_gpus(stages: Sequence[Footprint], there: int) -> int:
    """Return how many of so many GPUs train."""
    return max(n for n in RANKS if n <= there and are_busy(stages, n))


def _unknown(what: str, name: str, known: Sequence[str], workload: str, recipe: str) -> str:
    return (
        f"{what} {name!r} has no footprints ({suggest(name, known)}); measure it: "
        f"`{MEASURE} --workload {workload}` (recipe {recipe})"
    )


def _of_batch(rows: list[dict[str, Any]], stage: str, batch: int | None) -> list[dict[str, Any]]:
    """Return the rows of a stage, with the global batch replaced by a given one."""
    found = [row for row in rows if row["stage"] == stage]
    if batch is None or found[0]["kind"] == "prepare":
        return found
    own = {"global_batch": batch, "recipe_micro_batch": min(batch, found[0]["recipe_micro_batch"])}
    steps = -(-int(found[0]["samples_per_epoch"]) // batch)
    return [{**row, **own, "steps_per_epoch": steps} for row in found]


def _stage(rows: list[dict[str, Any]], micro_batch: int | None) -> Footprint:
    rows = sorted(rows, key=lambda row: int(row["micro_batch"]))
    if rows[0]["kind"] == "prepare":
        return _footprint(rows[0], rows)
    wanted = micro_batch or int(rows[0]["recipe_micro_batch"])
    if int(rows[0]["global_batch"]) % wanted:
        raise ValueError(
            f"global_batch {rows[0]['global_batch']} is not a multiple of the micro-batch "
            f"{wanted}; change one of them"
        )
    counted = [row for row in rows if int(row["micro_batch"]) == wanted]
    return _footprint(counted[0] if counted else _between(rows, wanted), rows)


def _between(rows: list[dict[str, Any]], wanted: int) -> dict[str, Any]:
    """Return a row for `wanted` on the line through the two nearest counted micro-batches."""
    counted = [int(row["micro_batch"]) for row in rows]
    if len(rows) < 2 or wanted > counted[-1] * _MOST_EXTENSION:
        raise NotMeasuredError(
            f"a micro-batch of {wanted} is too far from those counted ({counted}); measure it: "
            f"`{MEASURE} --workload {rows[0]['workload']} --override micro_batch={wanted}`"
        )
    upper = next((i for i, size in enumerate(counted) if size > wanted), len(rows) - 1)
    upper = max(1, upper)
    low, high = rows[upper - 1], rows[upper]
    share = (wanted - counted[upper - 1]) / (counted[upper] - counted[upper - 1])
    row = {**low, "micro_batch": wanted, "modelled": True}
    for key in _BYTES:
        if key not in low:
            continue
        row[key] = int(max(0.0, low[key] + share * (high[key] - low[key])))
    return row


def _footprint(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> Footprint:
    micro_batch, samples = int(row["micro_batch"]), int(row["samples_per_epoch"])
    prepares, is_modelled = row["kind"] == "prepare", "modelled" in row
    # Fields with the same name in the file; the rest is computed from them.
    known = {field.name: row[field.name] for field in fields(Footprint) if field.name in row}
    computed = {
        "evaluations": 0 if prepares else row["evaluations"],
        "parameter_bytes": row["parameter_bytes"] + row.get("buffer_bytes", 0),
        "activation_bytes": _activation_bytes(row),
        "kept_bytes_per_sample": 0.0 if prepares else _kept_bytes_per_sample(rows),
        "channels_last": row.get("channels_last_share", 0.0) > 0.5,
        "basis": "modelled" if is_modelled else "measured",
        "source": f"{MEASURE}: a real step on fake tensors"
        + (", between counted micro-batches" if is_modelled else ""),
        "phases": tuple(Phase(**phase) for phase in row.get("phases", ())),
    }
    steps = -(-samples // micro_batch)
    return Footprint(**{"global_batch": micro_batch, "steps_per_epoch": steps, **known, **computed})


def _activation_bytes(row: Mapping[str, Any]) -> int:
    found = row.get("peak_activation_bytes")
    return int(row["peak_bytes"]) - int(row["parameter_bytes"]) if found is None else int(found)


def _kept_bytes_per_sample(rows: list[dict[str, Any]]) -> float:
    """Return the bytes backward reads per further sample; copies of weights do not grow."""
    low, high = rows[0], rows[-1]
    name = "usual_kept_bytes" if "usual_kept_bytes" in low else "kept_bytes"
    if len(rows) < 2:
        return float(low[name]) / int(low["micro_batch"])
    added = float(high[name]) - float(low[name])
    return max(0.0, added / (int(high["micro_batch"]) - int(low["micro_batch"])))
