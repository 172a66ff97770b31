"""The basis of a plan's figure, and its precision."""

from typing import Literal, TypeAlias

# measured: by a run or by counting a real step; published: by others, named in `source`;
# modelled: computed from the others; from memory: unchecked.
Basis: TypeAlias = Literal["measured", "published", "modelled", "from memory", "given"]


def rounded(value: float) -> float | int:
    """Round to five significant digits: no model here is more precise."""
    if value == int(value) and abs(value) >= 10_000:
        return int(value)
    return float(f"{value:.5g}")
