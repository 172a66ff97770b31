"""Plain tables and JSON for every command: numbers to the right, notes below."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

# Where the output is not a terminal, tables must not be folded to 80 columns.
PLAIN_WIDTH = 200


def console() -> Console:
    """Return the console for tables."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def show(
    rows: Sequence[Mapping[str, Any]], *, title: str | None = None, notes: Sequence[str] = ()
) -> None:
    """Print the rows as a table, then each note on a line."""
    screen = console()
    if rows:
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for name in rows[0]:
            numeric = all(isinstance(row[name], int | float | None) for row in rows)
            table.add_column(name, justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*(cell(value) for value in row.values()))
        screen.print(table)
    for note in notes:
        screen.print(note, markup=False)


def cell(value: object) -> str:
    """Format one value: thousands grouped, at most four significant digits, `-` for none."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def print_json(value: object) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2))
