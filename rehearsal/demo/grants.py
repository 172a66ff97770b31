"""The table of grants: every statement of the stacks, with the rehearsals whose calls used it.

A rehearsal writes permissions.json. needed_on_aws.toml has the reasons for unused statements.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "permissions.json"
_OF_A_RUN = re.compile(r"(InstanceRole)/[^/]+/Role (?:InstanceRole\w+Role)?(\w+)")


def keep(report: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Write a rehearsal's report of calls to its folder; return it."""
    (folder / FILE).write_text(json.dumps(report, indent=2) + "\n")
    return report


def usage(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a receipt's part of a report: how many statements, how many used, denials."""
    return {
        "statements": len(report["statements"]),
        "statements_used": sum(bool(each["calls"]) for each in report["statements"]),
        "denied": denials(report),
    }


def denials(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each call that policies denied."""
    return [
        f"{each['caller']} was denied {each['action']} on {each['resource']} {each['why']}, "
        f"{each['times']} times"
        for each in report["denied"]
    ]


def grants_page(folders: Sequence[Path]) -> tuple[str, list[str]]:
    """Return the table of the reports below the folders, in Markdown, and unexplained statements.

    Rehearsals are named after their folders. Below the table are the calls that were denied.
    """
    reasons = tomllib.loads(Path(__file__).with_name("needed_on_aws.toml").read_text("utf-8"))
    reports = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(path for folder in folders for path in folder.rglob(FILE))
    }
    if not reports:
        raise ValueError(f"no {FILE} in {folders[0]}; `make demo` and `make drill` write them")
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for where, report in reports.items():
        for each in report["statements"]:
            # Each run has its own role.
            policy = _OF_A_RUN.sub(r"\1/RUN/Role \2", each["policy"])
            row = rows.setdefault((policy, each["statement"]), {**each, "calls": {}})
            for action, times in each["calls"].items():
                of_action = row["calls"].setdefault(action, Counter())
                of_action[where] += times
    lines, unexplained = ["| statement | allows or denies | used by |", "|---|---|---|"], []
    for (policy, statement), row in sorted(rows.items()):
        used = "; ".join(
            f"{action} {sum(times.values())} times in {', '.join(times)}"
            for action, times in sorted(row["calls"].items())
        )
        if not used:
            used = reasons.get(policy, {}).get(statement, "")
            unexplained += [] if used else [f"{policy}: {statement}"]
        what = f"{row['effect']} {', '.join(row['actions'])}"
        lines.append(f"| {policy}: {statement} | {what} | {used} |")
    denied = [f"- {where}: {each}" for where in reports for each in denials(reports[where])]
    return "\n".join([*lines, *(["", *denied] if denied else [])]) + "\n", unexplained
