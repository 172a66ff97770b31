"""One number of an answer, with how far to believe it: no figure of a plan is shown without."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

# measured: by a run or by counting a real step; published: by someone else, named in `source`;
# modelled: computed from the others; from memory: nobody here has checked it.
Basis: TypeAlias = Literal["measured", "published", "modelled", "from memory", "given"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A value with its unit, its formula or source, and its basis."""

    value: float
    unit: str
    basis: Basis
    source: str

    def to_json(self) -> dict[str, Any]:
        """As in `plan --json` under "figures"."""
        return {
            "value": rounded(self.value),
            "unit": self.unit,
            "basis": self.basis,
            "source": self.source,
        }


def rounded(value: float) -> float | int:
    """Five significant digits: more would claim more than any model here knows."""
    if value == int(value) and abs(value) >= 10_000:
        return int(value)
    return float(f"{value:.5g}")
