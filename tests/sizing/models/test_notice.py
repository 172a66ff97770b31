"""The notice: baseline rates decide, never a burst."""

import pytest

from sizing import catalogue
from sizing.catalogue.gpus import find_gpu
from sizing.models.constants import Constants
from sizing.models.notice import NoticeFit, notice_fit


def fit(size: str, gigabytes: float, step: float = 1.0) -> NoticeFit:
    return notice_fit(
        checkpoint_bytes=gigabytes * 1e9,
        longest_step_seconds=step,
        gpu=find_gpu("NVIDIA A10G"),
        instance=catalogue.find(size),
        constants=Constants(),
    )


def test_the_upload_runs_at_the_baseline_of_the_size() -> None:
    # 2.5 Gb/s of g5.xlarge are 312.5 MB/s, of which uploads in parts reach 80 %.
    assert fit("g5.xlarge", 4.46).upload == pytest.approx(17.84)


@pytest.mark.parametrize(
    ("size", "gigabytes", "fits"),
    [
        ("g5.xlarge", 4.46, True),
        ("g5.xlarge", 25.9, False),
        ("g5.2xlarge", 25.9, True),
        ("g5.4xlarge", 25.9, True),
    ],
)
def test_which_checkpoints_fit_on_which_size(size: str, gigabytes: float, fits: bool) -> None:
    assert fit(size, gigabytes).fits is fits


def test_a_long_step_uses_up_the_notice() -> None:
    assert not fit("g5.4xlarge", 0.1, step=120).fits


def test_the_sentence_adds_up() -> None:
    found = fit("g5.xlarge", 4.46)
    assert found.total == pytest.approx(
        found.detection + found.step + found.copy + found.hash + found.upload + found.commit
    )
    assert f"= {found.total:.1f} s" in found.sentence()
