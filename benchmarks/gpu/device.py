"""Measurements without a run: the machine, and how long a save blocks."""

import math
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.gpu.session import Session
from contract.grammar import Interval
from training.durable import (
    AttemptContext,
    Checkpointer,
    CheckpointPolicy,
    Events,
    Head,
    LiveState,
    Position,
    RankEnvironment,
    Supervisor,
    World,
    open_store,
)

_NUM_SAVES = 6
_SAVE_SECONDS = 60.0
_WIDTH = 768

_State: TypeAlias = Mapping[str, Mapping[str, Tensor]]


def machine(session: Session) -> None:
    """Describe the machine and the software."""
    if session.is_dry:
        session.row("GPU, driver, memory", "none: a dry run on the CPU")
    else:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
        done = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        session.row("GPU, driver, memory", done.stdout.strip())
    versions = (platform.python_version(), torch.__version__, torch.version.cuda, os.cpu_count())
    session.row("Python, torch, CUDA, vCPUs", ", ".join(map(str, versions)))


def _copy_seconds(session: Session, source: Tensor, target: Tensor) -> float:
    return session.timed(lambda: target.copy_(source, non_blocking=True))


def saves(session: Session) -> None:
    """Measure how long saving a state on the device blocks, relative to a page-locked copy."""
    state = _make_state(60 if session.is_dry else 3000, session.device)
    total = sum(t.nbytes for part in state.values() for t in part.values())
    flat = torch.empty(total, dtype=torch.uint8, device=session.device)
    host = torch.empty(total, dtype=torch.uint8, pin_memory=not session.is_dry)
    host.copy_(flat)
    copy = statistics.median(_copy_seconds(session, flat, host) for _ in range(5))
    del flat, host
    blocked, durable = _save_seconds(session, state)
    first, later = blocked[0], statistics.median(blocked[2:])
    name = f"{total / 1e9:.2f} GB: the first save blocks, s"
    session.row(name, f"{first:.3f}", f"{first / copy:.1f} x a page-locked copy")
    what = f"{later / copy:.2f} x a page-locked copy ({total / copy / 1e9:.1f} GB/s)"
    session.row("later saves block, s", f"{later:.3f}", what)
    seconds = statistics.median(durable[2:])
    session.row("durable in a folder, s", f"{seconds:.2f}", f"{total / seconds / 1e9:.2f} GB/s")


def _make_state(megabytes: int, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Return weights and AdamW's moments in float32, layer by layer; its steps are on the CPU."""
    shapes: list[tuple[int, ...]] = [
        *((3 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH)),
        *[(_WIDTH,)] * 6,
    ]
    numbers = sum(math.prod(shape) for shape in shapes)
    num_layers = max(1, round(megabytes * 1e6 / (12 * numbers)))
    model = {
        f"layers.{layer}.{index}": torch.randn(shape, device=device)
        for layer in range(num_layers)
        for index, shape in enumerate(shapes)
    }
    optimizer: dict[str, Tensor] = {}
    for index, weight in enumerate(model.values()):
        optimizer[f"/state/{index}/step"] = torch.tensor(1.0)
        optimizer[f"/state/{index}/exp_avg"] = 0.1 * weight
        optimizer[f"/state/{index}/exp_avg_sq"] = 0.01 * weight
    return {"model": model, "optimizer": optimizer}


def _save_seconds(session: Session, state: _State) -> tuple[list[float], list[float]]:
    """Return the seconds for which each of a few saves in a row blocks, and until it is durable."""
    blocked, durable = [], []
    with tempfile.TemporaryDirectory(dir=session.folder) as name:
        folder = Path(name)
        with _open_run(folder) as context:
            checkpointer = Checkpointer(context)
            live = LiveState(tensors=state, state={})
            policy = CheckpointPolicy(context, checkpointer, 1, lambda: live, is_sharded=False)
            for step in range(1, _NUM_SAVES + 1):
                request = policy.request(
                    Position(stage="a", stage_step=step, step=step), "periodic"
                )
                began = session.timed(lambda request=request: checkpointer.save_async(request))  # type: ignore[misc]
                blocked.append(began)
                rest = session.timed(lambda: checkpointer.wait(_SAVE_SECONDS))
                durable.append(began + rest)
                checkpointer.poll()
    return blocked, durable


@contextmanager
def _open_run(folder: Path) -> Iterator[AttemptContext]:
    """Open a run in the folder, as an attempt would."""
    store, supervisor = open_store(str(folder / "run")), Supervisor(budget_seconds=120)
    lease = supervisor.take_lease(store, "benchmark", "here", 60)
    assert not isinstance(lease, Head)
    context = AttemptContext(
        store=store,
        own_lease=lease,
        events=Events(store, "here"),
        supervisor=supervisor,
        interval=Interval(value=1, unit="steps"),
        scratch=folder,
        world=World(RankEnvironment(), torch.device("cpu")),
    )
    try:
        yield context
    finally:
        context.lease.release()
