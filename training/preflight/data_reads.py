"""Refuses what reads data where tensors have only shapes, by the operation and its line."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from training.errors import UserError

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
