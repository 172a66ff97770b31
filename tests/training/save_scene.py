"""A checkpointer over a folder store that can be held up, slowed down or broken."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from contract.grammar import parse_interval
from training.durable.attempt.notice import Notice
from training.durable.attempt.supervisor import Supervisor
from training.durable.attempt.world import AttemptContext, RankEnvironment, World
from training.durable.record.head import (
    KEEP_NEWEST,
    CheckpointEntry,
    Head,
    Kind,
    Position,
    checkpoint_name,
)
from training.durable.record.lease import Lease, acquire
from training.durable.record.metrics import Events, Metrics
from training.durable.save.tensors.checkpointer import Checkpointer, SaveRequest, TensorSave
from training.durable.save.tensors.resume import CheckpointContent
from training.durable.save.tensors.state import LiveState
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Store, Upload

CPU = torch.device("cpu")


class GatedStore(FolderStore):
    """A folder whose uploads can be held up, slowed down or broken."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.bytes_per_second: float | None = None
        self.pass_time: Callable[[float], None] = time.sleep
        self.error: Exception | None = None  # met by the next part
        self.num_begun = 0
        self.slowed_seconds = 0.0
        self.is_at_gate = threading.Event()  # a part has come to it

    def upload(self, key: str, *arguments: Any) -> Upload:
        self.num_begun += 1
        upload = super().upload(key, *arguments)
        put = upload.put

        def gated_put(number: int, start: int, data: memoryview, sha256: bytes) -> None:
            self.is_at_gate.set()
            assert self.gate.wait(600)
            error, self.error = self.error, None
            if error:
                raise error
            if self.bytes_per_second:
                with self._line:
                    seconds = len(data) / self.bytes_per_second
                    self.pass_time(seconds)
                    self.slowed_seconds += seconds
            put(number, start, data, sha256)

        upload.put = gated_put  # type: ignore[method-assign]
        return upload

    _line = threading.Lock()


def write_state(store: Store, capture: LiveState, step: int = 0) -> CheckpointEntry:
    """Write a checkpoint that no head names; return its entry."""
    name = checkpoint_name(step, 1)
    entry = CheckpointEntry(name=name, step=step, stage="a", epoch=0, kind="periodic", files=())
    request = SaveRequest(entry=entry, position=Position(stage="a"), state=capture)
    publisher: Any = SimpleNamespace(store=store)
    return replace(entry, files=TensorSave(publisher, request, capture).send(name, []))


def open_context(
    store: FolderStore, root: Path, interval: str = "1steps", world: World | None = None
) -> AttemptContext:
    """An attempt whose rank 0 has taken the lease."""
    world = world or World(RankEnvironment(), CPU)
    lease = None
    if world.leads:
        lease = acquire(store, "run-1", "i-1", 60, lambda s: False, lambda holder: None)
        assert isinstance(lease, Lease)
    return AttemptContext(
        store=store,
        own_lease=lease,
        metrics=Metrics(store, 1, "nonce", root / "metrics.jsonl" if world.leads else None),
        events=Events(store, "i-1"),
        supervisor=Supervisor(budget_seconds=120),
        interval=parse_interval(interval),
        retention=KEEP_NEWEST,
        scratch=root,
        world=world,
    )


class Scene:
    """A checkpointer, its schedule and its store, and a state of one tensor."""

    def __init__(self, root: Path, interval: str = "1steps") -> None:
        self.store = self.open_store(root)
        self.context = open_context(self.store, root, interval)
        self.checkpointer = Checkpointer(self.context)
        self.schedule = self.checkpointer.schedule
        self.weights = torch.zeros(1000)

    def open_store(self, root: Path) -> Any:
        return GatedStore(root / "run")

    def position(self, step: int, **fields: Any) -> Position:
        return Position(stage="a", stage_step=step, step=step, **fields)

    def capture(self, step: int) -> LiveState:
        self.weights.fill_(step)
        tensors: dict[str, dict[str, Tensor]] = {"model": {"w": self.weights}, "optimizer": {}}
        return LiveState(tensors=tensors, state={"step": step})

    def request(
        self, step: int, kind: Kind = "periodic", live: LiveState | None = None, **fields: Any
    ) -> SaveRequest:
        position = self.position(step, **fields)
        entry = CheckpointEntry(
            name=checkpoint_name(step, self.context.generation),
            step=step,
            stage=position.stage,
            epoch=0,
            kind=kind,
            files=(),
            is_best=position.is_best,
        )
        return SaveRequest(entry=entry, position=position, state=live or self.capture(step))

    def begin(self, step: int, **fields: Any) -> None:
        self.checkpointer.save_async(self.request(step, **fields))

    def is_due(self, position: Position, steps_per_epoch: int) -> bool:
        is_saving = self.checkpointer.is_saving
        return self.schedule.is_due(position, steps_per_epoch, is_saving=is_saving)

    def notice(self, seconds: float) -> Notice:
        now = time.monotonic()
        return Notice(cause="notice", received=now, deadline=now + seconds)

    def emergency(self, step: int, seconds: float) -> bool:
        request = self.request(step, "emergency")
        return self.checkpointer.save_and_release(request, self.notice(seconds))

    def finish(self) -> None:
        deadline = time.monotonic() + 120
        while self.checkpointer.is_saving:
            assert time.monotonic() < deadline
            self.checkpointer.poll()
            time.sleep(0.001)

    def committed(self) -> list[tuple[int, float]]:
        """Step and weight of every checkpoint that the head names."""
        head = Head.read(self.store)
        assert head is not None
        found = []
        for entry in head.checkpoints:
            snapshot = CheckpointContent.read(self.store, entry)
            weights = snapshot.tensors["model"]["w"]
            assert bool((weights == weights[0]).all())
            found.append((entry.step, float(weights[0])))
        return found

    def set_rate(self, bytes_per_second: float) -> None:
        """Let a first save measure the rate that later ones reckon with."""
        self.store.bytes_per_second = bytes_per_second
        self.checkpointer.save(self.request(1))
