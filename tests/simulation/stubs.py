"""What stands for GPUs, tensors, a report's page and what processes print."""

import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from contract.keys import checkpoint_prefix
from contract.samples import MODULUS, sum_of_all
from tests.simulation.bucket import SimulatedStore
from tests.simulation.clock import CLOCK, Event, Lock, PoweredOffError, sleep
from tests.simulation.versions import is_older
from training.durable import errors as errors_file
from training.durable.attempt import resume_point
from training.durable.attempt import supervisor as supervisor_file
from training.durable.record.head import step_of
from training.durable.record.lease import Lease
from training.durable.record.metrics import Events
from training.durable.report import receipt
from training.durable.save import publish
from training.durable.save.tensors import checkpointer as checkpointer_file
from training.durable.save.tensors.state import SLICES
from training.durable.store.protocol import Store
from training.durable.store.transfer import (
    CancelledError,
    FileEntry,
    TransferProgress,
    checksum_of,
    has_fast_hash,
    new_hash,
    put_text,
)
from userdata import interruption_handler

_PARTS = 6  # of a state's upload, each sent and repeated by itself


@dataclass(frozen=True, kw_only=True)
class SizedState:
    """A state by its size: what the checkpointer, the policy and the estimate ask of it."""

    size: int
    state: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.size

    @property
    def files(self) -> list[Any]:
        return [SimpleNamespace(size=self.size)]


class StateCopies:
    """The host's copies: time to make one, and no room for a large one."""

    def __init__(self, _: object, num_copiers: int = 1) -> None:
        self._num_copiers = num_copiers

    def prepare(self, live: SizedState) -> None:
        return

    def copy(self, live: SizedState, writing: object) -> SizedState | None:
        if live.size * self._num_copiers > 40e9:
            return None
        sleep(live.size / 4e9)
        return replace(live)


def send_state(
    store: SimulatedStore,
    name: str,
    state: SizedState,
    progress: TransferProgress,
    where: str,
    tasks: Sequence[Callable[[], None]] = (),
) -> tuple[FileEntry, ...]:
    for task in tasks:
        task()
    prefix, rate = checkpoint_prefix(name), CLOCK.process.supervisor.upload_rate
    # Of a share many: its rank, and rank 0 with it, waits for the one under way if it is dropped.
    num = max(_PARTS, math.ceil(state.size / rate / 4)) if SLICES in state.state else _PARTS
    part = -(-state.size // num)
    for _ in range(num):
        if progress.stop.is_set():
            raise CancelledError("the save was cancelled")
        store.repeating(prefix, lambda client: client.transmit(part / rate), progress.stop)
        progress.add(part)
    content = json.dumps({"step": step_of(name)}).encode()
    share = f".rank-{CLOCK.process.rank:04d}" if SLICES in state.state else ""
    entry = put_text(store, prefix, f"model{share}.safetensors", content)
    if has_fast_hash() and not is_older():
        digest = new_hash(content, is_fast=True).digest()
        entry = replace(entry, sha256="", xxh128=checksum_of([digest]))
    return (entry,)


def is_intact(data: bytes, file: FileEntry) -> bool:
    """Whether a file's bytes are those that its entry names."""
    digest = new_hash(data, is_fast=bool(file.xxh128)).digest()
    return checksum_of([digest]) == (file.xxh128 or file.sha256)


_SUMS = [0]


def mixed_ids(index: int) -> str:
    """Return the mixed ids of the samples of one step of an epoch, as metrics keep them."""
    while len(_SUMS) <= index + 1:
        _SUMS.append(sum_of_all.__wrapped__(len(_SUMS)))
    return f"{(_SUMS[index + 1] - _SUMS[index]) % MODULUS:016x}"


def place_of(error: BaseException) -> str:
    """Return an error with the file and line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def _progress() -> TransferProgress:
    return TransferProgress(stop=Event(), lock=Lock(), moved_at=CLOCK.now)  # type: ignore[arg-type]


def _exit(code: int) -> None:
    CLOCK.process.end(code)
    raise PoweredOffError


_NOTHING = lambda *_, **__: None  # noqa: E731
_FAULTS = SimpleNamespace(
    dump_traceback=_NOTHING,
    dump_traceback_later=_NOTHING,
    cancel_dump_traceback_later=_NOTHING,
)
_STUBS: tuple[tuple[Any, str, Any], ...] = (
    (checkpointer_file, "send_state", send_state),
    (checkpointer_file, "HostCopies", StateCopies),
    (publish, "TransferProgress", _progress),
    (supervisor_file, "os", SimpleNamespace(_exit=_exit)),
    (supervisor_file, "faulthandler", _FAULTS),
    (supervisor_file, "print", _NOTHING),
    (errors_file, "print", _NOTHING),
    (receipt, "write_report", _NOTHING),
    (interruption_handler, "say", _NOTHING),
)


@contextmanager
def stubbed(more: Sequence[tuple[Any, str, Any]] = ()) -> Iterator[None]:
    """Context without GPUs, tensors, a report's page and what processes print."""
    stubs = (*_STUBS, *more)
    patches = [mock.patch.object(owner, name, stub, create=True) for owner, name, stub in stubs]
    patches += [
        mock.patch.object(interruption_handler, "subprocess", SimpleNamespace(
            run=lambda command, **_: _own_host().systemctl(command),
            TimeoutExpired=TimeoutError)),
        mock.patch.object(interruption_handler, "leave_event", lambda name, status, **fields:
                          _own_host().leave_event(name, status, **fields)),
    ]  # fmt: skip
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def newest_valid(store: Store, lease: Lease, events: Events, read: Any) -> Any:
    """Where an attempt of a workload resumes, which is judged."""
    host, named = CLOCK.process.supervisor.host, lease.head.checkpoints
    try:
        found = resume_point.newest_valid(store, lease, events, read)
    except errors_file.MachineError:  # it could read none
        host.world.judge_resume(host.machine, named, "")
        raise
    host.world.judge_resume(host.machine, named, found[0].entry.name if found[0] else "")
    return found


def _own_host() -> Any:
    return CLOCK.process.supervisor
