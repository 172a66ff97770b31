"""One number that a program reported of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """A metric's value; at which step, where the program said so."""

    name: str
    value: float  # may be NaN or infinite, as the program computed it
    step: int | None
