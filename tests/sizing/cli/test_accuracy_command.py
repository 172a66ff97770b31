"""Predictions against runs that nobody here made: what holds, and what is known to miss."""

from pathlib import Path

import pytest

from sizing.cli import accuracy_command as accuracy
from sizing.cli.accuracy_command import CheckedTruth, summary
from sizing.cli.tables import markdown_table
from sizing.evidence.truths import counts, largest_batch, predictable, truths
from sizing.models.constants import Constants

DOCUMENT = Path(__file__).parents[3] / "docs" / "sizing.md"
# The aims of this project for runs that a fit has not seen.
AIM, FIRST_AIM = 0.80, 34


def share(rows: list[CheckedTruth]) -> float:
    return sum(row.is_hit is True for row in rows) / len(rows)


@pytest.mark.parametrize("left_out", ["model", "chip", "lab", "code", "model and chip"])
def test_four_runs_of_five_are_within_thirty_percent_unseen(left_out: str) -> None:
    assert share(accuracy.throughput_rows(left_out)) >= AIM


def test_of_the_first_held_out_rows_thirty_four_are_within_thirty_percent() -> None:
    first = [row for row in accuracy.throughput_rows() if row.truth.role == "held out"]
    assert len(first) == 38
    assert sum(row.is_hit is True for row in first) >= FIRST_AIM


def test_the_memory_that_tensors_need_is_less_than_every_library_takes() -> None:
    assert all(
        row.ratio is not None and row.ratio < 1
        for row in accuracy.memory_rows(with_workspace=False)
    )


def test_workspaces_explain_half_of_what_is_missing_in_memory() -> None:
    assert share(accuracy.memory_rows()) >= 0.5


def test_the_batch_that_fits_tells_ten_percent_of_memory() -> None:
    rows, constants = accuracy.ladder(), Constants()

    def exact(scale: float) -> int:
        return sum(largest_batch(r, constants, scale=scale) == r.batch for r in rows)

    assert exact(1.0) >= 0.75 * len(rows)
    assert exact(1.0) > max(exact(0.8), exact(1.2))


def test_models_never_seen_are_ranked_as_they_ran() -> None:
    rows = [row for row in accuracy.throughput_rows() if row.truth.is_on_the_ladder]
    assert accuracy.ranking(rows) > accuracy.RANKING_LIMIT


def test_every_row_has_a_source_a_lab_and_counts_of_its_model() -> None:
    assert all(truth.source and truth.lab for truth in truths())
    for kind in ("throughput", "memory", "launches"):
        assert {truth.model for truth in predictable(kind)} <= counts().keys()


def test_names_are_unique() -> None:
    names = [truth.name for truth in truths()]
    assert len(names) == len(set(names))


def test_spearman_knows_order_and_its_reverse() -> None:
    assert accuracy.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert accuracy.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1


def test_the_table_of_the_documentation_is_what_the_command_prints() -> None:
    assert markdown_table(summary()) in DOCUMENT.read_text(encoding="utf-8")


def test_every_miss_is_named_in_the_documentation() -> None:
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    missed = [row.truth.name for row in accuracy.all_rows() if row.is_hit is False]
    assert [name for name in missed if name not in text] == []
