"""Seconds of a step in our loop, beside a bare PyTorch loop over the same model and optimizer.

Ours derives the noise of every micro-batch, reads the loss a step late and records it; the bare
loop indexes tensors. Evaluations and saves are in neither figure.
"""

import json
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from training.run import main
from training.torture.workload import NUM_INPUTS, Classify, SmallConfig

WORKLOAD = "training.torture.workload:SMALL"
NUM_ROWS = 16 + 16 * 12


def measure(*, rounds: int, width: int) -> list[dict[str, Any]]:
    """Alternate both loops; one row each: median milliseconds of a step, and the ratio."""
    torch.set_num_threads(1)
    medians: dict[str, list[float]] = {"bare PyTorch": [], "ours": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "log").open("w") as log, redirect_stdout(log):
            make = ["data", "make", f"--workload={WORKLOAD}", f"--count={NUM_ROWS}"]
            if main([*make, f"--out={folder / 'made'}"]) != 0:
                raise RuntimeError("the dataset could not be made")
            for number in range(rounds):
                medians["bare PyTorch"].append(_bare(folder / "made", width))
                medians["ours"].append(_ours(folder, width, number))
    base = statistics.median(medians["bare PyTorch"])
    return [
        {
            "loop": loop,
            "median ms": 1000 * statistics.median(values),
            "min ms": 1000 * min(values),
            "max ms": 1000 * max(values),
            "x bare PyTorch": statistics.median(values) / base,
        }
        for loop, values in medians.items()
    ]


def _ours(folder: Path, width: int, number: int) -> float:
    metrics = folder / f"metrics-{number}.jsonl"
    options = [f"--workload={WORKLOAD}", "--recipe=seconds", f"--dataset-uri={folder / 'made'}"]
    options += [
        f"--override=width={width}",
        "--override=epochs=2",
        "--override=deterministic=false",
    ]
    where = [f"--run-uri={folder / f'run-{number}'}", f"--metrics-file={metrics}"]
    if main(["run", *options, *where, "--checkpoint-interval=1000epochs"]) != 0:
        raise RuntimeError(f"the run failed; see {folder}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [x for x in lines if x["kind"] == "step" and x["stage"] == "narrow"]
    seconds = [float(len(x["ids"]) / x["samples_per_second"]) for x in steps]
    return statistics.median(seconds[2:])


def _bare(dataset: Path, width: int) -> float:
    rows = load_file(dataset / "rows.safetensors")
    torch.manual_seed(0)
    stage = Classify(name="narrow", config=SmallConfig(width=width), width=width)
    model = stage.model(None)  # type: ignore[arg-type]
    optimizer = stage.optimizer(model)
    size, micro = stage.settings.global_batch, stage.settings.micro_batch
    seconds: list[float] = []
    for _ in range(2):
        for ids in torch.split(torch.randperm(len(rows["y"]) - 16), size):
            began = time.monotonic()
            optimizer.zero_grad(set_to_none=True)
            for part in torch.split(ids, micro):
                x = rows["x"][part] + 0.1 * torch.randn(len(part), NUM_INPUTS)
                loss = F.cross_entropy(model(x), rows["y"][part], reduction="sum") / size
                loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seconds.append(time.monotonic() - began)
    return statistics.median(seconds[2:])
