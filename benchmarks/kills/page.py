"""Writes docs/kill-table.md from the results that are kept next to this file."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from benchmarks.kills import QUIET_SECONDS, RATE
from benchmarks.kills.rows import ROWS, WAYS
from sizing.cli.tables import markdown_table
from training.proof.check.player import MOST_FAILED_STARTS, NOTICE_SECONDS

RESULTS = Path(__file__).with_name("results.json")
PAGE = REPOSITORY / "docs" / "kill-table.md"
_COLUMNS = (
    *("kills", "bits equal", "samples", "torn", "mismatched", "s lost", "saves lost"),
    "never back",
)
_HEAD = """# The kill table: public trainers and plain save habits, killed on purpose

Written by `python -m benchmarks kill_table --page` from benchmarks/kills/results.json; rows that
were not run are missing.

Each script runs twice to its end and is then killed at seeded moments, many of them inside a save,
in three ways: SIGKILL to all its processes (kill); a notice, with the end {notice:g} s later
(notice); a termination (shutdown). *Alone*, it starts again in the same folder, as with a disk that
outlives the machine, and gets SIGTERM at a notice and at a shutdown, 10 s before its end. *Ours* is
`python -m training run --program`: each life is a new machine without its predecessor's disk, and
{rate:.0%} of the store's answers are late, wrong or lost. The runs are short and on CPUs: steps are
slowed down, a notice is {notice:g} s ahead instead of two minutes, and a folder is quiet after
{quiet:g} s instead of 10.

- **bits equal**: runs that ended with the uninterrupted run's weights, out of those that ended;
  *not repeatable*: two uninterrupted runs differ.
- **samples**: how many more / fewer counted in the end than in an uninterrupted run, if reported.
- **torn**: starts that could not read the saved files; **mismatched**: files from several saves.
- **s lost**: repeated work, mean over all kills and maximum; **saves lost**: the most of it that a
  finished save had held.
- **never back**: runs that failed {failed} times in a row or did not end.
"""


def text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    times = {"notice": NOTICE_SECONDS, "quiet": QUIET_SECONDS}
    parts = [_HEAD.format(rate=RATE, failed=MOST_FAILED_STARTS, **times)]
    for title, is_trainer in (("Public trainers", True), ("Save habits", False)):
        chosen = [line for line in lines if bool(line["versions"]) == is_trainer]
        rows = [
            {
                "script": one["script"],
                "": WAYS[one["way"]],
                **{name: one[name] for name in _COLUMNS},
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
        parts += [f"## {title}", "", markdown_table(rows), "", *notes, *[""] * bool(notes)]
    return "\n".join(parts).rstrip() + "\n"


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
