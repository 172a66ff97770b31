"""Steps per second of a training that the interpreter bounds, alone and while checkpoints go to S3.

`python -m benchmarks.s3_training --megabytes N --rounds N` with AWS_ENDPOINT_URL prints one line of
JSON. The saves are the trainer's own, one after the other; only steps during one are counted.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.checkpoint_state import make_state, open_run, save_request
from benchmarks.s3_client import DISCARD
from training.save.checkpointer import Checkpointer
from training.save.schedule import Schedule
from training.store.part_process import PartProcess
from training.store.s3 import S3Store

_LAYERS, _WIDTH, _BATCH = 30, 32, 8
_SECONDS = 4.0


class _NoProcess(PartProcess):
    """Leaves all to the trainer's threads, as before there was a process."""

    def start(self) -> bool:
        return False


def measure(megabytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Alternate the training alone, with uploads by its own threads, and by their own process."""
    torch.set_num_threads(1)
    state, step = make_state(megabytes), _small_steps()
    inside, beside = S3Store(DISCARD, "inside"), S3Store(DISCARD, "beside")
    inside.part_process = _NoProcess(DISCARD, "inside")
    rates: dict[str, list[tuple[float, float]]] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        open_run(inside, Path(name)) as threads,
        open_run(beside, Path(name)) as process,
    ):
        ways = {
            "alone": None,
            "uploads by its own threads": Checkpointer(threads, Schedule(threads.interval), None),
            "uploads by their own process": Checkpointer(process, Schedule(process.interval), None),
        }
        for number in range(rounds + 1):
            for way, checkpointer in ways.items():
                found = _round(step, checkpointer, state)
                if number:  # the first round warms up
                    rates.setdefault(way, []).append(found)
    size = sum(t.nbytes for part in state.values() for t in part.values()) / 1e9
    return {
        way: {
            "steps/s": statistics.median(steps for steps, _ in found),
            "GB/s": size * statistics.median(saves for _, saves in found),
        }
        for way, found in rates.items()
    }


def _small_steps() -> Callable[[], None]:
    """Steps of many small operations, with gaps of a few microseconds between them."""
    block = [nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU()]
    model = nn.Sequential(*(nn.Sequential(*block) for _ in range(_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(_BATCH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _round(
    step: Callable[[], None], checkpointer: Checkpointer | None, state: Any
) -> tuple[float, float]:
    """Steps per second during saves, and saves per second, of some seconds of training."""
    num_steps = num_saves = 0
    waited, began = 0.0, time.perf_counter()
    while (spent := time.perf_counter() - began) < _SECONDS or (
        checkpointer is not None and checkpointer.is_saving
    ):
        if checkpointer is not None:
            checkpointer.poll()
            if not checkpointer.is_saving and spent < _SECONDS:
                before = time.perf_counter()
                checkpointer.save_async(save_request(state, num_saves + 1))
                waited += time.perf_counter() - before
                num_saves += 1
        step()
        num_steps += 1
    seconds = time.perf_counter() - began - waited
    return num_steps / seconds, num_saves / seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.megabytes, arguments.rounds)))
