"""A selection's requirements and results, and the families that are no longer supported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sizing.catalogue import Price
from sizing.models.serving import Throughput

Phase = Literal["experiment", "prepare", "train", "tune", "serve-batch", "serve-online"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Prices = Callable[[str], tuple[Price | None, Price | None]]

# AWS's page on Inf1 in the Neuron SDK: "Inf1 instances are no longer supported".
UNSUPPORTED = {
    "inf1": "the Neuron SDK no longer supports Inf1",
    "p3": "p3 is absent from the EC2 API's data since 2026",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """The purpose of the size and what it must offer; None for no requirement."""

    phase: Phase
    model: str | None = None
    throughputs: Mapping[str, Throughput] = field(default_factory=dict)
    requests_per_minute: float | None = None
    latency_ms: float | None = None
    min_instances: int = 1
    needs_cuda: bool = False
    gpu_memory_mib: int | None = None
    memory_gib: float = 0.0
    vcpus: int = 0
    cpu_percent: float = 20.0
    hours_per_day: float = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A size that meets the requirements: cost in the unit of its phase, reasons and cautions."""

    size: str
    usd: float
    figures: Mapping[str, Any]
    reasons: tuple[str, ...]
    cautions: tuple[str, ...] = ()
    is_supported: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeSelection:
    """The ranking, what was left out and why, and where common advice differs."""

    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, str]
    differs: tuple[str, ...]
