"""The counts that the accuracy of sizing stands on are counted again."""

import json

import pytest

from benchmarks.anchor_footprints import FILE, footprint
from benchmarks.anchors.models import anchors, precisions
from tests.training.forked import in_fork

COUNTED = json.loads(FILE.read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize(
    "name", ["growth_dense", pytest.param("growth_moe", marks=pytest.mark.slow)]
)
def test_language_models_count_as_in_the_file(name: str) -> None:
    assert in_fork(lambda: footprint(anchors()[name], precisions()[name])) == COUNTED[name]


def test_upstreams_language_models_have_the_size_of_its_log() -> None:
    assert COUNTED["growth_dense"]["parameters"] / 1e6 == pytest.approx(119.36, rel=1e-3)
    assert COUNTED["growth_moe"]["parameters"] / 1e6 == pytest.approx(526.43, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in anchors() if not n.startswith("growth")])
def test_image_models_count_as_in_the_file(name: str) -> None:
    assert in_fork(lambda: footprint(anchors()[name], precisions()[name])) == COUNTED[name]


def test_berts_have_the_size_of_their_paper() -> None:
    # Devlin et al. 2019: 110 M and 340 M, here without the pooler and the types of tokens.
    assert COUNTED["bert_base_384"]["parameters"] / 1e6 == pytest.approx(110, rel=0.02)
    assert COUNTED["bert_large_384"]["parameters"] / 1e6 == pytest.approx(340, rel=0.02)


def test_the_shares_tell_kinds_of_models_apart() -> None:
    shares = {
        n: (c["convolution_share"], c["grouped_share"])
        for n, c in COUNTED.items()
        if "rcnn" not in n
    }
    assert shares["bert_large_384"] == (0, 0)
    assert shares["resnet50"] == (pytest.approx(1, abs=0.01), 0)
    assert shares["mobilenet_v2"][1] == 0  # depthwise
    assert shares["regnet_x_3_2gf"][1] > 0.3


def test_every_model_of_the_ground_truths_is_counted() -> None:
    assert set(anchors()) <= COUNTED.keys()
