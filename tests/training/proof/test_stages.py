"""`check` shortens every stage, and one of steps ends in mid-epoch as it does in a run."""

import pytest

from tests.training.tiny import TINY, tiny_config
from training.proof.attempt import shortened
from training.workload import Train


@pytest.mark.parametrize(("asked", "epochs", "steps"), [(None, 2, 7), (24, 6, 24)])
def test_a_stage_keeps_its_unit(asked: int | None, epochs: int, steps: int) -> None:
    config = tiny_config(second_steps=100, evaluate_every_steps=50)
    stages = shortened(TINY, asked).stages(config)
    first, second = (stage.settings for stage in stages if isinstance(stage, Train))
    assert (first.epochs, first.steps) == (epochs, None)
    assert (second.epochs, second.steps) == (None, steps)
    assert first.evaluate_every_steps == second.evaluate_every_steps == 3
