"""A number with its basis: every figure of a plan is shown with one."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

# measured: by a run or by counting a real step; published: by others, named in `source`;
# modelled: computed from the others; from memory: unchecked.
Basis: TypeAlias = Literal["measured", "published", "modelled", "from memory", "given"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A value with its unit, its formula or source, and its basis."""

    value: float
    unit: str
    basis: Basis
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return the figure as in `plan --json` under "figures"."""
        return {
            "value": rounded(self.value),
            "unit": self.unit,
            "basis": self.basis,
            "source": self.source,
        }


def rounded(value: float) -> float | int:
    """Return five significant digits: no model here is more precise."""
    if value == int(value) and abs(value) >= 10_000:
        return int(value)
    return float(f"{value:.5g}")
