"""Checkpoints beside their peers, in alternating rounds of one run: blocked, durable, CPU, memory.

Every peer saves the same tensors to the same disk and is durable after fsync. The baselines are a
plain copy in memory, which training must wait for, and a plain write with fsync of as many bytes.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import REPOSITORY
from benchmarks.checkpoint_state import make_state, open_run, save_request
from training.attempt.notice import Notice
from training.save.checkpointer import Checkpointer
from training.save.schedule import Schedule
from training.store.folder import FolderStore
from training.store.protocol import Upload

State: TypeAlias = Mapping[str, Mapping[str, Tensor]]
# Saves into a folder and returns once all is durable: the earlier time from which training could
# have continued, or None.
Save: TypeAlias = Callable[[Path], float | None]

COPY, WRITE = "plain copy in memory", "plain write + fsync"


@dataclass(slots=True)
class Times:
    """Seconds of one method, in the order of the rounds."""

    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def measure(*, rounds: int, megabytes: int, folder: Path | None = None) -> list[dict[str, Any]]:
    """Save with every method in turn; return one row each, medians over the rounds."""
    if rounds < 1 or megabytes < 1:
        raise ValueError(f"give at least 1 round and 1 megabyte, got {rounds} and {megabytes}")
    root = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=folder))
    try:
        state = make_state(megabytes)
        size = sum(t.nbytes for part in state.values() for t in part.values())
        with open_run(FolderStore(root / "run"), root) as context:
            checkpointer = Checkpointer(context, Schedule(context.interval), None)
            times = _run_rounds(_methods(state, checkpointer), root, rounds)
        rows = _rows(times, size)
        with redirect_stdout(sys.stderr):  # what the checkpointer logs at a notice is not a result
            rows += _under_a_cap(state, size, root)
        return [*rows, *_memory_rows(megabytes)]
    finally:
        shutil.rmtree(root)


def _run_rounds(methods: Mapping[str, Save], root: Path, rounds: int) -> dict[str, Times]:
    """Run one warm-up round, then all methods in turn: a slow minute affects each of them."""
    times = {name: Times() for name in methods}
    for number in range(rounds + 1):
        for name, save in methods.items():
            os.sync()
            target = root / "peer"
            began, cpu = time.perf_counter(), time.process_time()
            continued = save(target)
            ended = time.perf_counter()
            if number:
                times[name].blocked.append((continued or ended) - began)
                times[name].durable.append(ended - began)
                times[name].cpu.append(time.process_time() - cpu)
            shutil.rmtree(target, ignore_errors=True)
    return times


def _methods(state: State, checkpointer: Checkpointer) -> dict[str, Save]:
    flat = torch.cat([t.reshape(-1) for part in state.values() for t in part.values()])
    copy = torch.empty_like(flat)
    nested = {part: dict(tensors) for part, tensors in state.items()}
    merged = {f"{part}/{n}": t for part, tensors in state.items() for n, t in tensors.items()}
    steps = iter(range(1, 10**6))

    def ours(target: Path) -> float | None:
        checkpointer.save_async(save_request(state, next(steps)))
        continued = time.perf_counter()
        checkpointer.wait(600)
        checkpointer.poll()
        return continued

    def plain_copy(target: Path) -> float | None:
        copy.copy_(flat)
        return None

    return {
        COPY: plain_copy,
        WRITE: lambda target: _write(target, flat),
        "ours, behind the training": ours,
        "safetensors save_file": lambda target: _synced(
            target, lambda path: save_file(merged, path)
        ),
        "torch.save": lambda target: _synced(target, lambda path: torch.save(nested, path)),
    }


def _write(target: Path, flat: Tensor) -> None:
    target.mkdir()
    array: Any = flat.numpy()
    data = memoryview(array).cast("B")
    with (target / "raw").open("wb", buffering=0) as stream:
        # Appended: writing into a file preallocated to its length took twice as long.
        for first in range(0, len(data), 16 * 2**20):
            stream.write(data[first : first + 16 * 2**20])
        os.fsync(stream.fileno())


def _synced(target: Path, save: Callable[[Path], None]) -> None:
    target.mkdir()
    save(target / "file")
    with (target / "file").open("rb") as stream:
        os.fsync(stream.fileno())


def _rows(times: Mapping[str, Times], size: int) -> list[dict[str, Any]]:
    copy = statistics.median(times[COPY].blocked)
    raw = statistics.median(times[WRITE].durable)
    rows = []
    for name, own in times.items():
        blocked, durable = statistics.median(own.blocked), statistics.median(own.durable)
        rows.append(
            {
                "what": name,
                "blocked ms": 1000 * blocked,
                "ms more than a copy": 1000 * (blocked - copy),
                "x copy": blocked / copy,
                "durable GB/s": size / durable / 1e9 if name != COPY else None,
                "x write": raw / durable if name != COPY else None,
                "CPU s/GB": statistics.median(own.cpu) / size * 1e9,
                "note": f"{size / 1e6:.0f} MB",
            }
        )
    return rows


class _CappedStore(FolderStore):
    """A folder behind a line of `bytes_per_second`."""

    def __init__(self, root: Path, bytes_per_second: float) -> None:
        super().__init__(root)
        self._rate = bytes_per_second
        self._line = threading.Lock()

    def pass_line(self, size: int) -> None:
        with self._line:
            time.sleep(size / self._rate)

    def upload(self, key: str, size: int, part_bytes: int, stop: threading.Event) -> Upload:
        upload = super().upload(key, size, part_bytes, stop)
        put = upload.put

        def slow_put(number: int, start: int, data: memoryview, sha256: bytes) -> None:
            self.pass_line(len(data))
            put(number, start, data, sha256)

        upload.put = slow_put  # type: ignore[method-assign]
        return upload


def _under_a_cap(state: State, size: int, root: Path, seconds: float = 3.0) -> list[dict[str, Any]]:
    """Measure notice to commit over a line that needs `seconds` for the bytes alone."""
    store = _CappedStore(root / "capped", size / seconds)
    with open_run(store, root) as context:
        checkpointer = Checkpointer(context, Schedule(context.interval), None)
        now = time.monotonic()
        notice = Notice(cause="notice", received=now, deadline=now + 120)
        assert checkpointer.save_and_release(save_request(state, 1, "emergency"), notice)
        ours = time.monotonic() - now
    began = time.monotonic()
    _synced(root / "local", lambda path: torch.save(dict(state), path))
    store.pass_line(size)
    peer = time.monotonic() - began
    names = {"ours, notice to commit": ours, "torch.save to disk, then upload": peer}
    return [
        {"what": name, "note": f"{took:.2f} s, {took / seconds:.2f} x the line's {seconds:.1f} s"}
        for name, took in names.items()
    ]


def _memory_rows(megabytes: int) -> list[dict[str, Any]]:
    rows = []
    for kind in ("staged", "streamed"):
        command = [sys.executable, "-m", "benchmarks.checkpoint_state", kind]
        done = subprocess.run(
            [*command, f"--megabytes={megabytes}"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        share = found["added_mb"] / found["state_mb"]
        note = f"{found['added_mb']:.0f} MB added, {share:.2f} x the state"
        rows.append({"what": f"host memory, {kind}", "note": note})
    return rows


def columns(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the same columns, for a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{n: "" if row.get(n) is None else row[n] for n in names} for row in rows]
