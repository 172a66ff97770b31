"""Numbers for people: rates, durations and tables of them, as text."""

from collections.abc import Mapping, Sequence
from typing import Any


def readable(rate: float) -> str:
    """Format a rate for people: 1,234, 12 and 0.37."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def duration(seconds: float) -> str:
    """Format seconds for people: 12 s, 3 min 20 s, 5 h 7 min."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format rows as lines with aligned columns, numbers to the right."""
    names = list(rows[0]) if rows else []
    columns = [[name, *(str(row[name]) for row in rows)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    is_number = [all(isinstance(row[name], int | float) for row in rows) for name in names]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in zip(*columns, strict=True)
    ]
