"""Seconds of a step in our loop and in bare PyTorch loops over the same model and optimizer.

Ours derives the noise of every micro-batch, reads the loss a step late and records it. No figure
includes evaluations or saves. On a shared machine the model's own work varies more from round to
round than any loop costs, so the rest of a step is measured separately.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pytest import MonkeyPatch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Sequential
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from training.cli.main import main
from training.proof.torture.workload import (
    NUM_HELD_OUT,
    NUM_INPUTS,
    Classify,
    JitteredRows,
    SmallConfig,
)

WORKLOAD = "training.proof.torture.workload:SMALL"
NUM_ROWS = NUM_HELD_OUT + 16 * 12
_MICRO_BATCH = 8


def measure(*, rounds: int, width: int) -> list[dict[str, Any]]:
    """Alternate the loops; return one row each: milliseconds of a step and of the loop's own part.

    The ratio adds each loop's own part to the same model work.
    """
    if rounds < 1:
        raise ValueError(f"give at least one round, got {rounds}")
    torch.set_num_threads(1)
    loops = ("bare PyTorch, tensors indexed", "bare PyTorch, DataLoader", "ours")
    rounds_of: dict[str, list[_Seconds]] = {loop: [] for loop in loops}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "log").open("w") as log, redirect_stdout(log), _timed_work() as work:
            make = ["data", "make", f"--workload={WORKLOAD}", f"--count={NUM_ROWS}"]
            if main([*make, f"--out={folder / 'made'}"]) != 0:
                raise RuntimeError("the dataset could not be made")
            _ours(folder, width, "warm-up", work)
            for number in range(rounds):
                made = folder / "made"
                rounds_of[loops[0]].append(_bare(made, width, _indexed, work))
                rounds_of[loops[1]].append(_bare(made, width, _collated, work))
                rounds_of[loops[2]].append(_ours(folder, width, str(number), work))
    return [_row(loop, seconds, rounds_of[loops[1]]) for loop, seconds in rounds_of.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seconds:
    """Medians over the steps of one round."""

    step: float
    outside: float  # of forward, backward, clipping and the optimizer


def _row(loop: str, rounds: list[_Seconds], base: list[_Seconds]) -> dict[str, Any]:
    step, outside = (
        statistics.median(getattr(one, name) for one in rounds) for name in ("step", "outside")
    )
    before = statistics.median(one.outside for one in base)
    work = statistics.median(one.step - one.outside for one in base)
    return {
        "loop": loop,
        "median ms": 1000 * step,
        "min ms": 1000 * min(one.step for one in rounds),
        "outside the model's work, ms": 1000 * outside,
        "ms more than DataLoader": 1000 * (outside - before),
        "x DataLoader, by what is outside": (work + outside) / (work + before),
    }


@contextmanager
def _timed_work() -> Iterator[list[float]]:
    """Collect the seconds of each step's model work, from clearing gradients to the update."""
    steps: list[float] = []
    spent = 0.0

    def timed(act: Callable[..., Any], begins: bool = False, ends: bool = False) -> Any:
        @wraps(act)
        def measured(*arguments: Any, **named: Any) -> Any:
            nonlocal spent
            spent = 0.0 if begins else spent
            began = time.perf_counter()
            try:
                return act(*arguments, **named)
            finally:
                spent += time.perf_counter() - began
                if ends:
                    steps.append(spent)

        return measured

    with MonkeyPatch.context() as patch:
        patch.setattr(AdamW, "zero_grad", timed(AdamW.zero_grad, begins=True))
        patch.setattr(Sequential, "__call__", timed(Sequential.__call__))
        patch.setattr(F, "cross_entropy", timed(F.cross_entropy))
        patch.setattr(Tensor, "backward", timed(Tensor.backward))
        patch.setattr(torch.nn.utils, "clip_grad_norm_", timed(torch.nn.utils.clip_grad_norm_))
        patch.setattr(AdamW, "step", timed(AdamW.step, ends=True))
        yield steps


def _ours(folder: Path, width: int, name: str, work: list[float]) -> _Seconds:
    work.clear()
    metrics = folder / f"metrics-{name}.jsonl"
    options = [f"--workload={WORKLOAD}", "--recipe=plain", f"--dataset-uri={folder / 'made'}"]
    options += [
        f"--override=width={width}",
        "--override=epochs=2",
        "--override=deterministic=false",
    ]
    where = [f"--run-uri={folder / f'run-{name}'}", f"--metrics-file={metrics}"]
    if main(["run", *options, *where, "--checkpoint-interval=1000epochs"]) != 0:
        raise RuntimeError(f"the run failed; see {folder}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [x for x in lines if x["kind"] == "step" and x["stage"] == "narrow"]
    seconds = [float(x["num_samples"] / x["samples_per_second"]) for x in steps]
    return _medians(seconds, work)


def _medians(seconds: list[float], work: list[float]) -> _Seconds:
    outside = [a - b for a, b in zip(seconds, work[: len(seconds)], strict=True)]
    return _Seconds(step=statistics.median(seconds[2:]), outside=statistics.median(outside[2:]))


def _bare(
    dataset: Path,
    width: int,
    batches: Callable[[JitteredRows], Iterator[tuple[Tensor, Tensor]]],
    work: list[float],
) -> _Seconds:
    work.clear()
    data = load_file(dataset / "rows.safetensors")
    rows = JitteredRows(data["x"][NUM_HELD_OUT:], data["y"][NUM_HELD_OUT:])
    torch.manual_seed(0)
    stage = Classify(name="narrow", config=SmallConfig(width=width), width=width)
    model = stage.model(None)  # type: ignore[arg-type]
    optimizer = stage.optimizer(model)
    size = stage.settings.global_batch
    seconds: list[float] = []
    for _ in range(2):
        epoch = batches(rows)
        for _ in range(len(rows) // size):
            began = time.monotonic()
            optimizer.zero_grad(set_to_none=True)
            for _ in range(size // _MICRO_BATCH):
                x, y = next(epoch)
                loss = F.cross_entropy(model(x), y, reduction="sum") / size
                loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seconds.append(time.monotonic() - began)
    return _medians(seconds, work)


def _indexed(rows: JitteredRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without making samples: two indexed tensors, noise drawn for all at once."""
    for part in torch.split(torch.randperm(len(rows)), _MICRO_BATCH):
        yield rows.x[part] + 0.1 * torch.randn(len(part), NUM_INPUTS), rows.y[part]


def _collated(rows: JitteredRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches made sample by sample, as data read from files or augmented must be."""
    loader: DataLoader[Any] = DataLoader(
        _Samples(rows), batch_size=_MICRO_BATCH, shuffle=True, collate_fn=rows.collate
    )
    for batch in loader:
        yield batch["x"], batch["y"]


class _Samples(Dataset[Any]):
    def __init__(self, rows: JitteredRows) -> None:
        self._rows = rows
        self._generator = torch.Generator()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows.get(index, 0, self._generator)
