"""The sums that wait on one GPU: as the models count them, and as the trainer sets them aside."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sizing.models import footprints
from tests.sizing import sample_footprints
from training.engine.reduction import sums_set_aside


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sample_footprints.write(tmp_path / "footprints.json")


@pytest.mark.parametrize("num_micro", [1, 2, 3, 4, 5, 8, 9, 16, 17, 100])
def test_sums_that_wait_on_one_gpu_are_those_of_the_trainer(path: Path, num_micro: int) -> None:
    (whole,) = footprints.counted_stages("trajectory", "full", path=path)
    model = torch.nn.Linear(256, 256, bias=False)
    alone = replace(
        whole, global_batch=num_micro, micro_batch=1, gradient_bytes=model.weight.nbytes
    )
    assert alone.aside_bytes == sum(t.nbytes for t in sums_set_aside(model, num_micro))
