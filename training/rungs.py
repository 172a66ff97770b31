"""Rungs that many workloads share: ways to use less memory, cheapest first.

A rung's name starts with its kind, and a workload's rungs come in the order of KINDS: the first
ones cost no accuracy and little time; the last ones change the numbers, or are only offered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from training.settings import changed

KINDS = ("optimizer", "activations", "micro-batch", "autocast", "offered")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One step of the out-of-memory ladder: turns a config into one that needs less memory.

    A rung that changes what is learned, such as the model's width, is not taken but offered, with
    `override` as NAME=VALUE. Such rungs come last.
    """

    name: str
    apply: Callable[[Any], Any]
    override: str = ""


def rung(name: str, *, override: str = "", **values: Any) -> Rung:
    """Return a rung that sets fields of the config to these values."""
    return Rung(name=name, apply=lambda c: changed(c, **values), override=override)


def micro_batch_rungs(c: Any, least: int = 1) -> Sequence[Rung]:
    """Halve `micro_batch`, down to `least`; the global batch stays, so gradients accumulate."""
    sizes = []
    size = c.settings.micro_batch
    while size % 2 == 0 and size >= 2 * least:
        size //= 2
        sizes.append(size)
    return [rung(f"micro-batch {size}", micro_batch=size) for size in sizes]


def autocast_rungs(c: Any) -> Sequence[Rung]:
    """Compute in bfloat16 where the recipe computes in float32."""
    is_float32 = c.settings.precision == "float32"
    return [rung("autocast bfloat16", precision="bfloat16")] * is_float32


def offered_rung(**values: Any) -> Rung:
    """Return a rung that changes what is learned: a field that only the user may override."""
    ((name, value),) = values.items()
    return rung(f"offered {name}={value}", override=f"{name}={value}", **values)
