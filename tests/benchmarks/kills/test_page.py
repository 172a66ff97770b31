"""docs/kill-table.md says what the results beside the command say."""

import json
from pathlib import Path

import pytest

from benchmarks.kills import page
from benchmarks.kills.rows import ROWS


def test_the_page_is_what_the_results_say() -> None:
    assert page.PAGE.read_text() == page.text(page.read()), (
        "write it: python -m benchmarks kill_table --page --hours 0"
    )


def test_each_result_is_of_a_row_and_has_its_versions() -> None:
    rows = {row.name: row for row in ROWS}
    assert page.read()
    for record in page.read():
        assert set(rows[record["row"]].requirements) <= set(record["versions"]), record["row"]


def test_results_of_other_ways_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (known,) = (one for one in page.read() if one["row"] == page.read()[0]["row"])
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    first, second = ({**known["lines"][0], "way": way} for way in ("alone", "s3"))
    page.write([{**known, "lines": [first]}])
    page.write([{**known, "lines": [{**second, "torn": "3 (kill)"}]}])
    page.write([{**known, "lines": [{**second, "torn": "2 (notice)"}]}])
    (kept,) = json.loads((tmp_path / "results.json").read_text())
    assert sorted(line["way"] for line in kept["lines"]) == ["alone", "s3"]
    text = (tmp_path / "page.md").read_text()
    assert "2 (notice)" in text and "3 (kill)" not in text
