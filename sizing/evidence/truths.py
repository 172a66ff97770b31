"""Runs that others measured and published, with what their models compute and keep.

ground_truths.csv has the runs, each with its source; ground_truth_models.json what was counted of
their models, with the command and its commit; gpus.csv GPUs that EC2 lacks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sizing.catalogue.gpus import Gpu, find_gpu, gpus
from sizing.csv_rows import read_rows
from sizing.models.constants import MIB, Constants
from sizing.models.fitted import fitted
from sizing.models.step_time import Step

TRUTHS_FILE = Path(__file__).with_name("ground_truths.csv")
MODELS_FILE = Path(__file__).with_name("ground_truth_models.json")
GPUS_FILE = Path(__file__).with_name("gpus.csv")
# Reads gradients, reads and writes parameters and state; SGD has one state, AdamW two (float32).
OPTIMIZER_BYTES: Mapping[str, tuple[int, int]] = {"sgd": (20, 4), "adamw": (28, 8), "none": (0, 0)}
# GPUs that share a chip, and differ in memory, clock or power.
CHIPS: Mapping[str, str] = {
    "NVIDIA A100": "GA100",
    "NVIDIA A100 80GB": "GA100",
    "NVIDIA A100 80GB PCIe": "GA100",
    "NVIDIA H100": "GH100",
    "NVIDIA H100 PCIe": "GH100",
    "NVIDIA A10": "GA102",
    "NVIDIA A10G": "GA102",
    "NVIDIA RTX 3090": "GA102",
    "NVIDIA RTX A6000": "GA102",
    "NVIDIA RTX 4090": "AD102",
    "NVIDIA RTX 6000 Ada": "AD102",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """One published measurement.

    `role` is its part in the first fit of this project: `calibrates`, `held out`, `added` since, or
    `not predictable`. `lab` measured it; `host` is known where launches were measured.
    """

    name: str
    kind: str
    role: str
    lab: str
    host: str
    model: str
    gpu: str
    precision: str
    layout: str
    optimizer: str
    batch: int
    measured: float
    unit: str
    torch: str
    source: str

    @property
    def architecture(self) -> str:
        """Its model, the same for every length of its samples: bert_large_384 is bert_large."""
        name, _, tokens = self.model.rpartition("_")
        return name if name.startswith("bert_") and tokens.isdigit() else self.model

    @property
    def chip(self) -> str:
        """The chip of its GPU: one chip is sold under several names."""
        return CHIPS.get(self.gpu, self.gpu)

    @property
    def is_on_the_ladder(self) -> bool:
        """Whether its batch is the largest that timm's benchmark found to fit."""
        return self.gpu == "NVIDIA RTX 3090" and self.lab == "timm" and self.layout == "nhwc"

    @property
    def counted_as(self) -> str:
        """The precision that its model was counted in: tf32 keeps the same tensors as float32."""
        return "float32" if self.precision == "tf32" else self.precision


@cache
def truths(kind: str | None = None) -> tuple[Truth, ...]:
    """Return the rows of a kind, or all."""
    rows = read_rows(TRUTHS_FILE, Truth)
    return tuple(row for row in rows if kind in (None, row.kind))


def predictable(kind: str) -> tuple[Truth, ...]:
    """Return the rows of a kind whose model is known."""
    return tuple(t for t in truths(kind) if t.role != "not predictable")


@cache
def counts() -> Mapping[str, Mapping[str, Any]]:
    """Return the counts of the published models, by model."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(MODELS_FILE.read_text(encoding="utf-8"))[
        "models"
    ]
    return found


def gpu_of(truth: Truth) -> Gpu:
    """Return the GPU of a row, which need not be one of EC2's."""
    return gpus(GPUS_FILE).get(truth.gpu) or find_gpu(truth.gpu)


def step_of(truth: Truth) -> Step:
    """Return the computation and memory traffic of a step of the run."""
    count = counts()[truth.model]
    return Step(
        samples=truth.batch,
        flops_per_sample=count["flops_per_sample"],
        kept_bytes_per_sample=count[truth.counted_as]["kept_bytes_per_sample"],
        optimizer_traffic_bytes=count["parameters"] * OPTIMIZER_BYTES[truth.optimizer][0],
        precision=truth.precision.removeprefix("pure "),
        convolution_share=count["convolution_share"],
        grouped_share=count["grouped_share"],
        channels_last=truth.layout == "nhwc",
    )


# The batch sizes that timm's benchmark tries, downwards, until one fits.
LADDER = (512, 384, 256, 192, 128, 96, 64)
# Their code of 2019 kept more of a frozen batch norm; how much more is not known.
_OF_OTHER_CODE = ("torchvision",)


def counted_bytes(truth: Truth, batch: int) -> float:
    """Return the bytes of all tensors at the peak, from parameters to temporaries."""
    count = counts()[truth.model]
    own = count[truth.counted_as]
    parameters = float(count["parameters"])
    trainable = float(count.get("trainable_parameters", parameters))
    state = OPTIMIZER_BYTES[truth.optimizer][1]
    if "peak_bytes_per_sample" in own:  # counted to the peak of backward, gradients included
        return 4 * parameters + state * trainable + batch * float(own["peak_bytes_per_sample"])
    half_copies = 2 if truth.precision == "float16" else 0
    fixed = (4 + half_copies) * parameters + (4 + state) * trainable
    return fixed + batch * float(own["kept_bytes_per_sample"])


def missing_bytes(truth: Truth) -> float:
    """Return the bytes measured beyond the tensors' need: the libraries' workspaces."""
    return truth.measured * 1e9 - counted_bytes(truth, truth.batch)


def calibrating() -> list[Truth]:
    """Return the rows that the workspace is fitted to."""
    return [truth for truth in predictable("memory") if truth.lab not in _OF_OTHER_CODE]


def needed_mib(truth: Truth, batch: int, constants: Constants, *, scale: float = 1.0) -> float:
    """Return the MiB that must be free on the GPU, as in sizing/models/memory.py."""
    convolutions = float(counts()[truth.model].get("convolution_share", 1.0))
    workspace = fitted().workspace_mib * convolutions
    allocated = counted_bytes(truth, batch) / MIB + workspace
    return (allocated * (1 + constants.fragmentation_share) + constants.context_mib) * scale


def largest_batch(truth: Truth, constants: Constants, *, scale: float = 1.0) -> int:
    """Return the largest batch of the ladder that fits the run's GPU; 0 if none does."""
    there = gpu_of(truth).memory_mib
    fitting = (b for b in LADDER if needed_mib(truth, b, constants, scale=scale) <= there)
    return next(fitting, 0)
