"""The benchmark of the detector: contenders of one size that compute the same."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import detection_peers as peers
from benchmarks.gpu.detection_contender import Contender, Runner
from benchmarks.gpu.detection_peers import SCALES

ENCODER = Contender(
    who="ours", part="encoder attention", scale="tiny", device="cpu", implementation="deterministic"
)


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
