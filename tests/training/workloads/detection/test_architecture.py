"""Architectures that cannot be built are refused in a sentence."""

import pytest

from training.workloads.detection.architecture import Architecture


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"backbone": "resnet7"},
            "backbone is 'resnet7'; give one of resnet18, resnet34, resnet50",
        ),
        ({"backbone_norm": "batch"}, "backbone_norm is 'batch'; give one of frozen_batch, group"),
        ({"num_classes": 0}, "num_classes is 0; give at least 1"),
        ({"denoising_queries": -1}, "denoising_queries is -1; give at least 0"),
        ({"num_levels": 5}, "num_levels is 5; give 3 or 4"),
        ({"box_noise": 1.5}, "box_noise is 1.5; give a share from 0 to 1"),
        ({"width": 200}, "width 200 over num_heads 8: give a width that is a multiple of"),
        ({"num_heads": 7}, "width 256 over num_heads 7: give a width that is a multiple of"),
    ],
)
def test_fails_on_what_cannot_be_built(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Architecture(**{"num_classes": 2, **changes})  # type: ignore[arg-type]
