"""Tables, Markdown and JSON for every command: numbers to the right, notes below, one envelope.

Rows have the same keys everywhere: in JSON a key is a name with its unit (`usd_per_hour`), in a
table it becomes a heading (`$/h`).
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contract.readable import shown

# Width if the output is not a terminal: fits a log, a pull request or a page without scrolling.
PLAIN_WIDTH = 100
_SHORTEST_TEXT = 4
_WORDS = {
    "usd": "$", "percent": "%", "spot": "Spot", "gpu": "GPU", "gpus": "GPUs", "vcpus": "vCPUs",
    "mib": "MiB", "gib": "GiB", "gb": "GB", "ebs": "EBS", "mb": "MB", "gbps": "Gb/s",
}  # fmt: skip


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command: a table that `| head` cuts short is not a failure."""
        raise BrokenPipeError


def show_table(
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str | None = None,
    notes: Sequence[str] = (),
    markdown: bool = False,
) -> None:
    """Print the rows as a table, then the notes; long text is folded between words.

    As Markdown each note is a paragraph, and one that starts with a dash stays an item.
    """
    if markdown:
        parts = [f"## {title}\n"] * bool(title) + [f"{markdown_table(rows)}\n"] * bool(rows)
        parts += [note if note.startswith("- ") else f"{note}\n" for note in notes if note]
        print("", *parts, sep="\n", end="")
        return
    screen = _Screen(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    if rows:
        table = Table(
            title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
        )
        columns = [
            [table_heading(name), *(table_cell(row[name]) for row in rows)] for name in rows[0]
        ]
        numeric = [all(isinstance(row[n], int | float | None) for row in rows) for n in rows[0]]
        for column, is_number, width in zip(
            columns, numeric, _widths(columns, numeric, screen.width), strict=True
        ):
            justify: Literal["left", "right"] = "right" if is_number else "left"
            table.add_column(column[0], justify=justify, overflow="fold", width=width)
        for values in list(zip(*columns, strict=True))[1:]:
            # As text, not markup: a machine may have written a cell.
            table.add_row(*map(Text.from_ansi, values))
        screen.print(table)
    for note in notes:
        screen.print(note, markup=False)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table, or nothing without rows."""
    if not rows:
        return ""
    lines = [[table_heading(name) for name in rows[0]], ["---"] * len(rows[0])]
    lines += [[table_cell(row[name]) for name in rows[0]] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _widths(columns: Sequence[Sequence[str]], numeric: Sequence[bool], available: int) -> list[int]:
    """Return the columns' widths: text is folded, first between words, then within them."""
    widths = [max(len(text) for text in column) for column in columns]
    words = [
        max(len(word) for text in column for word in (*text.split(), "")) for column in columns
    ]
    # Each column has padding and a line to the next; there is a line at both ends.
    most = available - 2 * len(columns) - 1
    for floors in (words, [_SHORTEST_TEXT] * len(columns)):
        # A number may fold its heading, never itself.
        while sum(widths) > most and (
            wide := [
                place
                for place, (is_number, floor) in enumerate(zip(numeric, floors, strict=True))
                if widths[place] > (words[place] if is_number else floor)
            ]
        ):
            widths[max(wide, key=lambda place: widths[place])] -= 1
    return widths


def table_heading(name: str) -> str:
    """Return a key as a heading: `spot_usd_per_hour` is "spot $/h"; other text stays as it is."""
    if not is_key(name):
        return name
    words = " ".join(_WORDS.get(word, word) for word in name.split("_"))
    return words.replace(" per hour", "/h").replace(" per second", "/s")


def is_key(name: str) -> bool:
    """Whether `name` is a key of JSON: lower case, digits, underscores."""
    return name.isidentifier() and name == name.lower()


def table_cell(value: object) -> str:
    """Format one value: thousands grouped, at most four significant digits, `-` for none."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value) or "-"
    return shown(str(value))


def print_json(command: str, document: Mapping[str, Any]) -> None:
    """Print the one JSON document of a command, with the version of its format and its name.

    Infinite hours and the like become null: JSON has neither infinity nor NaN.
    """
    envelope = {"format": 1, "command": command, **document}
    print(json.dumps(_finite(envelope), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
