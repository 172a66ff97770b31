"""Text for people: rates, durations, tables of them, and what a machine wrote, for a terminal."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Controls, what reorders text and halves of letters, except tabs and line ends; of escape
# sequences, colours.
_CONTROL = re.compile(
    "(\x1b\\[[0-9;:]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_OVERWRITTEN = re.compile(r"[^\n]*\r(?=[^\r\n])")
_NO_COLOUR = "\x1b[0m"


def shown(text: str) -> str:
    """Return what a machine wrote, safe to print: colours stay, other controls become visible.

    Nothing in it can move the cursor, clear the screen, set a title or reach the clipboard. Of a
    line that was redrawn, as by a progress bar, the last state is left.
    """
    text = _OVERWRITTEN.sub("", text).replace("\r", "")
    text = _CONTROL.sub(lambda found: found[1] or ascii(found[0])[1:-1], text)
    is_coloured = "\x1b" in text and not text.endswith(_NO_COLOUR)
    return text + _NO_COLOUR if is_coloured else text


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
    columns = [[name, *(shown(str(row[name])) for row in rows)] for name in names]
    widths = [max(map(len, column)) for column in columns]
    is_number = [all(isinstance(row[name], int | float) for row in rows) for name in names]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in zip(*columns, strict=True)
    ]
