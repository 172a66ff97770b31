"""The counts of the published runs' models are those of the models that they are of."""

import pytest

from sizing.evidence.truths import counts


def test_upstreams_language_models_have_the_size_of_its_log() -> None:
    assert counts()["growth_dense"]["parameters"] / 1e6 == pytest.approx(119.36, rel=1e-3)
    assert counts()["growth_moe"]["parameters"] / 1e6 == pytest.approx(526.43, rel=1e-3)


def test_berts_have_the_size_of_their_paper() -> None:
    # Devlin et al. 2019: 110 M and 340 M, here without the pooler and the types of tokens.
    assert counts()["bert_base_384"]["parameters"] / 1e6 == pytest.approx(110, rel=0.02)
    assert counts()["bert_large_384"]["parameters"] / 1e6 == pytest.approx(340, rel=0.02)


def test_the_shares_tell_kinds_of_models_apart() -> None:
    shares = {
        n: (c["convolution_share"], c["grouped_share"])
        for n, c in counts().items()
        if "rcnn" not in n
    }
    assert shares["bert_large_384"] == (0, 0)
    assert shares["resnet50"] == (pytest.approx(1, abs=0.01), 0)
    assert shares["mobilenet_v2"][1] == 0  # depthwise
    assert shares["regnet_x_3_2gf"][1] > 0.3
