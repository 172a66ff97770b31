"""docs/kill-table.md says what the results beside the command say."""

from pathlib import Path

import pytest

from benchmarks.kills import QUIET_SECONDS, RATE
from benchmarks.kills import kill_table as page
from benchmarks.kills.kill_table import ROWS
from training.proof.check.lives import MOST_FAILED_STARTS, Lives


def test_the_page_is_what_the_results_say() -> None:
    assert page.PAGE.read_text() == page.page_text(page.read_results()), (
        "write it: python -m benchmarks kill_table --page --hours 0"
    )


def test_the_page_s_text_has_the_numbers_of_the_runs() -> None:
    text = " ".join(page.PAGE.read_text().split())
    for words in (
        f"a notice, with the end {Lives.NOTICE_SECONDS:g} s later",
        f"{RATE:.0%} of the store's answers",
        f"a folder is quiet after {QUIET_SECONDS:g} s",
        f"failed {MOST_FAILED_STARTS} times in a row",
    ):
        assert words in text


def test_each_row_has_lines_with_its_versions() -> None:
    lines = page.read_results()
    for row in ROWS:
        versions = [line["versions"] for line in lines if line["script"] == row.name]
        assert versions, row.name
        assert all(name in each for name in row.requirements for each in versions)


def test_lines_of_other_ways_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = page.read_results()[0]
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text("The text.\n\n## Public trainers\nOld.\n")
    page.write_page([{**known, "way": "s3", "torn": "3 (kill)"}])
    page.write_page([{**known, "way": "alone"}])
    page.write_page([{**known, "way": "s3", "torn": "2 (notice)"}])
    assert [line["way"] for line in page.read_results()] == ["alone", "s3"]
    text = (tmp_path / "page.md").read_text()
    assert "2 (notice)" in text and "3 (kill)" not in text
    assert text.startswith("The text.\n\n## Public trainers\n\n|") and "Old" not in text
