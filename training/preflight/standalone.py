"""A stage without a run, to measure or to try: only shapes matter, and reads are refused."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

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


# Of what leads from the line that reads to the error: torch, and the modes of this folder.
_BETWEEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@contextmanager
def refusing_reads(stage: str, what: str, remedy: str) -> Iterator[None]:
    """Turn the errors of fake tensors whose values are read into one sentence."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            operation = str(error)
        elif "numpy() is not supported" in str(error):
            operation = "numpy()"
        else:
            raise
        raise UserError(
            f"stage {stage!r} cannot be measured: {what} ({operation} in {_place_of(error)}), and "
            f"nothing but shapes is known here; {remedy}"
        ) from error


def _place_of(error: BaseException) -> str:
    """The innermost line of the workload, or of what it calls, that the error came through."""
    passed = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in passed if not frame.filename.startswith(_BETWEEN)]
    if not frames:
        return "torch itself"  # called from this folder, as an optimizer is
    frame = frames[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
