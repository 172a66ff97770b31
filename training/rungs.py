"""Rungs that many workloads share: ways to use less memory, cheapest first.

A rung's name starts with its kind, and a workload's rungs come in the order of KINDS: the first
ones cost no accuracy and little time, the last ones change the numbers, or are offered only.
"""

from collections.abc import Callable, Sequence
from typing import Any

from training.settings import changed
from training.workload import Rung

KINDS = ("optimizer", "activations", "micro-batch", "autocast", "offered")


def micro_batch_rungs(c: Any, least: int = 1) -> Sequence[Rung]:
    """Halve `micro_batch`, to no less; the global batch stays, so gradients are accumulated."""
    sizes = []
    size = c.settings.micro_batch
    while size % 2 == 0 and size >= 2 * least:
        size //= 2
        sizes.append(size)
    return [Rung(name=f"micro-batch {size}", apply=_with_micro_batch(size)) for size in sizes]


def autocast_rungs(c: Any) -> Sequence[Rung]:
    """Compute in bfloat16 where the recipe computes in float32."""
    if c.settings.precision != "float32":
        return []
    return [Rung(name="autocast bfloat16", apply=lambda c: changed(c, precision="bfloat16"))]


def offered_rung(**values: Any) -> Rung:
    """A rung that changes what is learned: these fields, which the user may override."""
    ((name, value),) = values.items()
    override = f"{name}={value}"
    return Rung(name=f"offered {override}", apply=lambda c: changed(c, **values), override=override)


def _with_micro_batch(size: int) -> Callable[[Any], Any]:
    return lambda c: changed(c, micro_batch=size)
