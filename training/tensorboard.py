"""TensorBoard event files from a run's metrics: made anew each time, each step once.

Afterwards and from the store, so that they show the lineage (what an interruption repeated is
shown once), and so that training depends on no library for them.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from training.errors import UserError
from training.history import History, Line

_MARK = "made-by-training"


def write_event_files(history: History, out: Path) -> int:
    """Replace what an earlier call wrote into `out`; return the number of values."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            "the package tensorboard is not installed; install it with: pip install tensorboard"
        ) from error
    if out.exists() and any(out.iterdir()) and not (out / _MARK).exists():
        raise UserError(f"{out} is not empty and was not made by this command; give a new folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / _MARK).touch()
    num = 0
    with SummaryWriter(str(out)) as writer:
        for tag, value, step in _values(history):
            writer.add_scalar(tag, value, step)
            num += 1
    return num


def _values(history: History) -> Iterator[tuple[str, float, int]]:
    for stage, steps in history.by_stage().items():
        for line in steps:
            for name in ("loss", "lr", "samples_per_second", "data_wait"):
                if line.get(name) is not None:
                    yield f"{stage}/{name}", line[name], line["step"]
            yield from _metrics(f"{stage}/train", line)
    for stage, lines in history.evaluations().items():
        for line in lines:
            yield from _metrics(f"{stage}/validation", line)


def _metrics(prefix: str, line: Line) -> Iterator[tuple[str, float, int]]:
    for name, value in line.get("metrics", {}).items():
        if value is not None:
            yield f"{prefix}/{name}", value, line["step"]
