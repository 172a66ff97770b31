"""The table of grants: merged from rehearsals, and each statement that none used has a reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from rehearsal.demo.grants import FILE, grants_page

RUNS = "TrainingStack/InstanceRole/{0}/Role InstanceRole{0}RoleDefaultPolicy"
ROLE = "TrainingStack/InstanceRole/RUN/Role DefaultPolicy"
PAGE = Path(__file__).parents[3] / "docs/permissions.md"


def report(folder: Path, **calls: dict[str, int]) -> None:
    statements = [
        {
            "policy": RUNS.format(folder.name),
            "statement": name,
            "effect": "Allow",
            "actions": ["s3:*"],
            "calls": made,
        }
        for name, made in calls.items()
    ]
    denied = [{"caller": "Role", "action": "s3:PutObject", "resource": "arn:aws:s3:::b/k",
               "why": "because no identity-based policy allows it", "times": 2}]  # fmt: skip
    folder.mkdir()
    (folder / FILE).write_text(json.dumps({"statements": statements, "denied": denied}))


def test_rehearsals_are_added_up_and_what_none_used_is_named(tmp_path: Path) -> None:
    report(tmp_path / "demo", Read={"s3:GetObject": 2}, SessionManager={}, Other={})
    report(tmp_path / "killed", Read={"s3:GetObject": 3}, SessionManager={}, Other={})
    page, unexplained = grants_page([tmp_path])
    assert f"| {ROLE}: Read | Allow s3:* | s3:GetObject 5 times in demo, killed |" in page
    assert "no Session Manager" in page
    assert unexplained == [f"{ROLE}: Other"]
    assert "- demo: Role was denied s3:PutObject on arn:aws:s3:::b/k because no" in page


def test_fails_without_a_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no permissions\.json in .*; `make demo`"):
        grants_page([tmp_path])


def _rows(page: str) -> dict[str, Any]:
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0]: row[2] for row in cells[1:]}


def test_each_statement_of_the_page_has_calls_or_a_reason() -> None:
    rows = _rows(PAGE.read_text(encoding="utf-8"))
    assert len(rows) > 30
    assert [name for name, used in rows.items() if not used.strip()] == []
