"""A state like a Transformer's with AdamW, and a run to save it to.

`python -m benchmarks.checkpoint_state staged|streamed --megabytes N` prints the host memory that
one save adds, in a process of its own.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from contract.grammar import Interval
from training.attempt.context import AttemptContext
from training.attempt.supervisor import Supervisor
from training.attempt.world import RankEnvironment, World
from training.record.checkpoint_entry import KEEP_NEWEST, Kind, checkpoint_name
from training.record.events import Events
from training.record.lease import Lease, acquire
from training.record.metrics import Metrics
from training.record.position import Position
from training.save.checkpointer import Checkpointer
from training.save.schedule import Schedule
from training.save.state import LiveState
from training.save.tensors import SaveRequest
from training.store.protocol import Store

WIDTH = 768


def make_state(megabytes: int) -> dict[str, dict[str, Tensor]]:
    """Return weights and both moments in float32, layer by layer, of about `megabytes`."""
    shapes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    layer = sum(rows * columns for rows, columns in shapes) + 6 * WIDTH
    count = max(1, round(megabytes * 1e6 / (12 * layer)))
    generator = torch.Generator().manual_seed(0)
    model: dict[str, Tensor] = {}
    for number in range(count):
        for index, shape in enumerate(shapes):
            model[f"layers.{number}.{index}.weight"] = torch.randn(shape, generator=generator)
        for index in range(6):
            model[f"layers.{number}.{index}.bias"] = torch.randn(WIDTH, generator=generator)
    optimizer: dict[str, Tensor] = {}
    for index, weight in enumerate(model.values()):
        optimizer[f"/state/{index}/step"] = torch.tensor(1.0)
        optimizer[f"/state/{index}/exp_avg"] = 0.1 * weight
        optimizer[f"/state/{index}/exp_avg_sq"] = 0.01 * weight
    return {"model": model, "optimizer": optimizer}


@contextmanager
def open_run(store: Store, scratch: Path) -> Iterator[AttemptContext]:
    """Open a run in the store, as an attempt does."""
    lease = acquire(store, "benchmark", "here", 60, lambda s: False, lambda holder: None)
    assert isinstance(lease, Lease)
    context = AttemptContext(
        store=store,
        own_lease=lease,
        metrics=Metrics(store, lease.head.generation, lease.head.nonce, None),
        events=Events(store, "here"),
        supervisor=Supervisor(budget_seconds=120),
        interval=Interval(value=1, unit="steps"),
        retention=KEEP_NEWEST,
        scratch=scratch,
        world=World(RankEnvironment(), torch.device("cpu")),
    )
    try:
        yield context
    finally:
        context.lease.release()
        context.metrics.close()


def save_request(
    tensors: Mapping[str, Mapping[str, torch.Tensor]], step: int, kind: Kind = "periodic"
) -> SaveRequest:
    """A request for the state as it is now."""
    return SaveRequest(
        name=checkpoint_name(step, 1),
        kind=kind,
        position=Position(stage="a", stage_step=step, step=step),
        epoch=0,
        state=LiveState(tensors=tensors, state={}),
    )


def added_memory(kind: str, megabytes: int) -> dict[str, float]:
    """Return the megabytes of the state, and the most that a save adds to them."""
    from training.store.folder import FolderStore

    tensors = make_state(megabytes)
    size = sum(t.nbytes for part in tensors.values() for t in part.values())
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    try:
        with open_run(FolderStore(folder / "run"), folder) as context:
            checkpointer = Checkpointer(context, Schedule(context.interval), None)
            before = _memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            request = save_request(tensors, 1)
            if kind == "staged":
                checkpointer.save_async(request)
                while checkpointer.is_saving:
                    checkpointer.poll()
                    time.sleep(0.01)
            else:
                checkpointer.save(request)
            return {"state_mb": size / 1e6, "added_mb": (_memory("VmHWM") - before) / 1e6}
    finally:
        shutil.rmtree(folder)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["staged", "streamed"])
    parser.add_argument("--megabytes", type=int, required=True)
    arguments = parser.parse_args()
    print(json.dumps(added_memory(arguments.kind, arguments.megabytes)))
