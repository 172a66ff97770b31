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
from sizing.models.step_time import Step

TRUTHS_FILE = Path(__file__).with_name("ground_truths.csv")
MODELS_FILE = Path(__file__).with_name("ground_truth_models.json")
GPUS_FILE = Path(__file__).with_name("gpus.csv")
# Reads gradients, reads and writes parameters and state; SGD has one state, AdamW two (float32).
OPTIMIZER_BYTES: Mapping[str, tuple[int, int]] = {
    "sgd": (20, 4),
    "adamw": (28, 8),
    "none": (0, 0),
}
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
