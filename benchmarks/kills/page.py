"""Writes docs/kill-table.md from the results that are kept next to this file."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from benchmarks.kills import RATE
from benchmarks.kills.rows import ROWS
from sizing import markdown_table

RESULTS = Path(__file__).with_name("results.json")
PAGE = REPOSITORY / "docs" / "kill-table.md"
_WAYS = {"alone": "alone", "folder": "ours, folder", "s3": "ours, S3"}
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


def text(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    from benchmarks.kills.lives import MOST_FAILED_STARTS

    row = ROWS[0]
    said = {row.name: row.users_must for row in ROWS}
    parts = [
        _HEAD.format(
            notice=row.notice_seconds,
            quiet=row.quiet_seconds,
            rate=RATE,
            failed=MOST_FAILED_STARTS,
        )
    ]
    for title, is_trainer in (("Public trainers", True), ("Save habits", False)):
        chosen = [record for record in results if bool(record["versions"]) == is_trainer]
        if chosen:
            table = markdown_table([row for record in chosen for row in _rows(record)])
            parts += [f"## {title}", "", table, ""]
            parts += [
                textwrap.fill(
                    f"- **{record['row']}** ({_versions(record)}): {said[record['row']]}",
                    width=100,
                    subsequent_indent="  ",
                    break_on_hyphens=False,
                )
                for record in chosen
                if said[record["row"]]
            ]
            parts += [""] * is_trainer
    return "\n".join(parts).rstrip() + "\n"


def write(results: Sequence[Mapping[str, Any]]) -> None:
    """Merge these results into the kept ones, and write the page."""
    kept = {record["row"]: record for record in read()}
    for record in results:
        known = kept.get(record["row"], {}).get("lines", [])
        ways = {line["way"] for line in record["lines"]}
        more = [line for line in known if line["way"] not in ways]
        kept[record["row"]] = {**record, "lines": [*record["lines"], *more]}
    ordered = [kept[row.name] for row in ROWS if row.name in kept]
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(text(ordered))


def read() -> list[dict[str, Any]]:
    """Return the kept results."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return found


def _rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = sorted(record["lines"], key=lambda line: list(_WAYS).index(line["way"]))
    return [
        {
            "script": record["row"],
            "": _WAYS[line["way"]],
            "kills": line["kills"],
            "bits equal": line["bits equal"],
            "samples": f"{line['samples repeated']} / {line['skipped']}",
            "torn": line["torn"],
            "mismatched": line["mismatched"],
            "s lost": f"{line['s lost per kill']:g} (most {line['most']:g})",
            "saves lost": f"{line['finished saves lost, s']:g}",
            "never back": line["never came back"],
        }
        for line in lines
    ]


def _versions(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())
