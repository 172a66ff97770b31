"""The seeds' tables: every figure is computed again, and every difference explained."""

import pytest

from sizing.evidence.seed_tables import SEEDS, Claim, claims, resnet50_hours

ALL = [claim for seed in SEEDS for claim in claims(seed)]


def find(seed: str, row: str, what: str) -> Claim:
    return next(c for c in claims(seed) if (c.row, c.what) == (row, what))


@pytest.mark.parametrize("claim", ALL, ids=lambda c: f"{c.seed}-{c.row}-{c.what}")
def test_every_figure_that_differs_says_why(claim: Claim) -> None:
    assert claim.difference == "same" or claim.why


@pytest.mark.parametrize(
    ("seed", "row", "what", "ours"),
    [
        ("000", "input of a sample", "32x64x64x3x4 bytes", 1.572864),
        ("000", "p4d.24xlarge", "cost", 21.957642),
        ("003", "ml.g5.2xlarge", "GPUs", 1),
        ("003", "model (DINO-4scale)", "GPU memory", 0.188),
    ],
)
def test_known_errors_are_corrected(seed: str, row: str, what: str, ours: float) -> None:
    assert find(seed, row, what).ours == pytest.approx(ours)


def test_resnet50_takes_days_where_the_seed_says_weeks() -> None:
    # facts: 41 to 44 GPU hours on an A10G, 29 h on a V100 as NVIDIA published it.
    assert 36 <= resnet50_hours("g5.2xlarge") <= 48
    assert 22 <= resnet50_hours("p3.2xlarge") <= 30
    assert resnet50_hours("g5.xlarge") > resnet50_hours("g5.2xlarge")


def test_fails_on_a_seed_without_tables() -> None:
    with pytest.raises(ValueError, match="known are 000, 002, 003"):
        claims("007")
