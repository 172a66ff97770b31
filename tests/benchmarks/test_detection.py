"""The detection benchmark: contenders of one size that compute the same, and a table of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.detection import peers, table
from benchmarks.detection.contender import Contender, Runner
from benchmarks.detection.scales import SCALES

ROOT = Path(__file__).parents[2]
ENCODER = Contender(
    who="ours", part="encoder attention", scale="tiny", device="cpu", implementation="deterministic"
)


def test_fails_for_a_scale_or_part_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="no scale 'huge'; give one of tiny, laptop, half, "):
        table.measure(scale="huge", rounds=1, seconds=1)
    with pytest.raises(ValueError, match="no part 'loss'; give some of encoder attention, "):
        table.measure(scale="tiny", rounds=1, seconds=1, parts=["loss"])
    with pytest.raises(ValueError, match="at least one round, got 0"):
        table.measure(scale="tiny", rounds=0, seconds=1)


def test_the_reference_is_a_pyramid_of_22_223_tokens() -> None:
    assert sum(height * width for height, width in SCALES["reference"].shapes) == 22_223


def test_all_contenders_compute_the_same_attention() -> None:
    torch.set_num_threads(1)
    found = {
        name: Runner(contender).steps(1)["result"]
        for name, contender in {
            "ours": ENCODER,
            "grid_sample": replace(ENCODER, implementation="reference"),
            "theirs": replace(ENCODER, who="transformers", implementation=""),
        }.items()
    }
    assert found["ours"] == pytest.approx(found["grid_sample"], rel=1e-5)
    assert found["ours"] == pytest.approx(found["theirs"], rel=1e-5)


@pytest.mark.slow
def test_the_peer_trains_as_many_parameters() -> None:
    """But for the label embedding of denoising, which it has not; its backbone learns as ours."""
    ours, _ = Runner(replace(ENCODER, part="step")), None
    model, _loss = peers.detector(SCALES["tiny"])
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert theirs == pytest.approx(ours.parameters, rel=0.01)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) > 0.9 * theirs


@pytest.mark.slow
def test_the_dry_run_measures_every_contender() -> None:
    rows = table.measure(scale="tiny", rounds=1, seconds=450, cpu=True)
    assert len(rows) == 3 + 3 + 5
    assert [row for row in rows if row["note"] or not row["ms"]] == []
