"""A run's lineage: repeated steps are counted once, and the newest generation wins.

A step that a lost machine did and the next one repeated has a line from each generation.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Line: TypeAlias = Mapping[str, Any]


def newest_by_step(lines: Iterable[Line], kind: str) -> dict[int, Line]:
    """Map each step to the line of this kind that counts."""
    ordered = sorted((line for line in lines if line["kind"] == kind), key=generation_of)
    return {line["step"]: line for line in ordered}


def generation_of(line: Line) -> int:
    """Return the generation that wrote a line or an event."""
    return int(line["generation"])
