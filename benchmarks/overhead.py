"""Seconds of a step in our loop, beside bare PyTorch loops over the same model and optimizer.

Ours derives the noise of every micro-batch, reads the loss a step late and records it. Evaluations
and saves are in none of the figures.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.run import main
from training.torture.workload import NUM_HELD_OUT, NUM_INPUTS, Classify, Rows, SmallConfig

WORKLOAD = "training.torture.workload:SMALL"
NUM_ROWS = NUM_HELD_OUT + 16 * 12
_MICRO_BATCH = 8


def measure(*, rounds: int, width: int) -> list[dict[str, Any]]:
    """Alternate the loops; one row each: median milliseconds of a step, and the ratios.

    A ratio is the median over the rounds: the speed of a shared machine drifts between them.
    """
    torch.set_num_threads(1)
    bare, collated, ours = "bare PyTorch, tensors indexed", "bare PyTorch, DataLoader", "ours"
    medians: dict[str, list[float]] = {bare: [], collated: [], ours: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "log").open("w") as log, redirect_stdout(log):
            make = ["data", "make", f"--workload={WORKLOAD}", f"--count={NUM_ROWS}"]
            if main([*make, f"--out={folder / 'made'}"]) != 0:
                raise RuntimeError("the dataset could not be made")
            _ours(folder, width, "warm-up")
            for number in range(rounds):
                medians[bare].append(_bare(folder / "made", width, _indexed))
                medians[ours].append(_ours(folder, width, str(number)))
                medians[collated].append(_bare(folder / "made", width, _collated))
    return [
        {
            "loop": loop,
            "median ms": 1000 * statistics.median(values),
            "min ms": 1000 * min(values),
            "max ms": 1000 * max(values),
            "x indexed": _ratio(values, medians[bare]),
            "x DataLoader": _ratio(values, medians[collated]),
        }
        for loop, values in medians.items()
    ]


def _ratio(values: list[float], base: list[float]) -> float:
    return statistics.median(value / one for value, one in zip(values, base, strict=True))


def _ours(folder: Path, width: int, name: str) -> float:
    metrics = folder / f"metrics-{name}.jsonl"
    options = [f"--workload={WORKLOAD}", "--recipe=seconds", f"--dataset-uri={folder / 'made'}"]
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
    seconds = [float(len(x["ids"]) / x["samples_per_second"]) for x in steps]
    return statistics.median(seconds[2:])


def _bare(
    dataset: Path, width: int, batches: Callable[[Rows], Iterator[tuple[Tensor, Tensor]]]
) -> float:
    data = load_file(dataset / "rows.safetensors")
    rows = Rows(data["x"][NUM_HELD_OUT:], data["y"][NUM_HELD_OUT:])
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
    return statistics.median(seconds[2:])


def _indexed(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """No sample is ever made: a batch is two tensors indexed, its noise drawn at once."""
    for part in torch.split(torch.randperm(len(rows)), _MICRO_BATCH):
        yield rows.x[part] + 0.1 * torch.randn(len(part), NUM_INPUTS), rows.y[part]


def _collated(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Sample by sample, as whatever is read from files or augmented has to be."""
    loader: DataLoader[Any] = DataLoader(
        _Samples(rows), batch_size=_MICRO_BATCH, shuffle=True, collate_fn=rows.collate
    )
    for batch in loader:
        yield batch["x"], batch["y"]


class _Samples(Dataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._generator = torch.Generator()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows.get(index, self._generator)
