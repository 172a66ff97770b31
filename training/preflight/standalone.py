"""Inputs for a stage without a run: for measuring and for trials, where only shapes matter."""

from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from training.errors import UserError
from training.workload import Dataset, Inputs

# (step, num_steps): what grows over a stage, such as a resolution, is largest in the last step.
LAST_STEP = (999, 1000)


class _NoDataset:
    """A placeholder for the dataset that explains on any access why there is none."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_data(self._stage)


def standalone_inputs(stage: str, config: Any) -> Inputs:
    """Inputs with a config only; reading data is refused."""
    return Inputs(
        config=config,
        dataset=cast(Dataset, _NoDataset(stage)),
        artifact=lambda name: _refuse_data(stage),
        prior=None,
        device=torch.device("cpu"),
        rank=0,
        world=1,
        seed=config.seed,
        scratch=Path("unused"),
    )


def _refuse_data(stage: str) -> NoReturn:
    raise UserError(
        f"stage {stage!r} cannot be measured: its model or optimizer reads the dataset or an "
        "artifact; let it take shapes from the config"
    )
