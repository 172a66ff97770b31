"""`python -m sizing catalogue`: every size, its figures and their sources; helpful refusals."""

import json
from pathlib import Path

import pytest

from sizing import catalogue
from sizing.__main__ import main


def test_every_size_is_listed_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalogue", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sizes"]
    assert [row["size"] for row in rows] == list(catalogue.instances())
    assert all(row["source"] and row["family_source"] and row["family_is"] for row in rows)
    assert all(row["spot_source"] for row in rows if row["on_demand_usd_per_hour"])


def test_every_family_is_described_once_and_none_is_left_over() -> None:
    assert set(catalogue.sizes.families()) == {
        each.family for each in catalogue.instances().values()
    }


def test_what_was_never_checked_says_so_in_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    main(["catalogue", "g5.xlarge"])
    shown = capsys.readouterr().out
    assert "compute_capability_from_memory" in shown
    assert "Ampere" in shown
    # The table of many sizes shows nothing from memory.
    main(["catalogue", "--family", "g5"])
    assert "Ampere" not in capsys.readouterr().out


def test_interruptions_stand_with_both_of_their_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["catalogue", "g5.2xlarge", "--json"])
    figures = json.loads(capsys.readouterr().out)["sizes"][0]
    assert figures["planned_interruptions_per_machine_hour"] > 0
    assert "skypilot-org/spot-traces" in figures["interruptions_source"]


def test_sizes_are_chosen_by_family_gpu_and_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    main(["catalogue", "--gpu", "l4", "--fit", "train", "--json"])
    sizes = {row["size"] for row in json.loads(capsys.readouterr().out)["sizes"]}
    assert {"g6.xlarge", "gr6.4xlarge", "g6e.xlarge"} <= sizes
    assert "g6f.large" not in sizes
    main(["catalogue", "--fit", "experiment", "--json"])
    assert {row["family"] for row in json.loads(capsys.readouterr().out)["sizes"]} == {"t3"}


def test_a_file_that_cannot_be_opened_is_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vms.csv"
    assert main(["catalogue", f"--import-snapshot={path}", "--date=2026-11-01"]) == 2
    assert capsys.readouterr().err == (
        f"error: {path}: No such file or directory; check the path and its permissions\n"
    )


def test_burst_and_baseline_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    main(["catalogue", "--family", "g5"])
    shown = capsys.readouterr().out
    assert "87.5-437.5" in shown
    assert "30 minutes in 24 hours" in " ".join(shown.split())
