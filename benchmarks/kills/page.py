"""Writes the tables of docs/kill-table.md from the results that are kept next to this file."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from benchmarks.kills.rows import ROWS, WAYS
from sizing import markdown_table

RESULTS = Path(__file__).with_name("results.json")
PAGE = REPOSITORY / "docs" / "kill-table.md"
_HIDDEN = ("way", "faults", "versions")
_FIRST = "## Public trainers"


def text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page: its text as it is, up to the tables, and these lines as tables."""
    parts = [PAGE.read_text().partition(_FIRST)[0]]
    for title, is_trainer in ((_FIRST, True), ("## Save habits", False)):
        chosen = [line for line in lines if bool(line["versions"]) == is_trainer]
        rows = [
            {
                "script": "",
                "": WAYS[one["way"]],
                **{k: v for k, v in one.items() if k not in _HIDDEN},
            }
            for one in chosen
        ]
        versions = {line["script"]: line["versions"] for line in chosen}
        notes = [
            textwrap.fill(
                f"- **{row.name}** ({versions[row.name]}): {row.users_must}",
                width=100,
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            for row in ROWS
            if row.users_must and row.name in versions
        ]
        parts += [title, "", markdown_table(rows), "", *notes, *[""] * bool(notes)]
    return parts[0] + "\n".join(parts[1:]).rstrip() + "\n"


def write(lines: Sequence[Mapping[str, Any]]) -> None:
    """Add these lines to the kept ones, or replace them, and write the page."""
    known = {(line["script"], line["way"]): line for line in [*read(), *lines]}
    order = product((row.name for row in ROWS), WAYS)
    kept = [known[key] for key in order if key in known]
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(text(kept))


def read() -> list[dict[str, Any]]:
    """Return the kept lines."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return found
