"""torch.distributed in virtual time: what `World` asks of it, between the ranks of an attempt.

A call is over once all ranks have entered it. A rank that is gone breaks gloo's connections, and
leaves NCCL's calls waiting, as it does one that all wait for; only a watchdog sees that. Ranks
whose calls differ would hang, or read each other's bytes: that breaks a promise at once.
"""

import pickle
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.simulation.clock import CLOCK, Event, Process, sleep
from training.durable.attempt import world as world_file

if TYPE_CHECKING:
    from tests.simulation.ranks import RankedHost


class Meeting:
    """The ranks of one attempt, with what they share."""

    def __init__(self, host: "RankedHost", size: int, *, is_gpu: bool) -> None:
        self.host, self.size = host, size
        self.hosts: dict[int, RankedHost] = {}  # of ranks, where they have several
        self.gone: set[int] = set()  # ended, or left the group
        self.notes: dict[str, str] = {}
        self.rounds: Counter[int] = Counter()  # how often each rank has begun to train
        self.diverged: dict[tuple[int, int], bool] = {}  # by round and step
        self.groups = (_Group(self, "gloo", breaks=True), _Group(self, "nccl", breaks=not is_gpu))

    def lose(self, rank: int) -> None:
        """A rank's process has ended, or has closed its connections."""
        self.gone.add(rank)
        self.look_again()

    def look_again(self) -> None:
        """Have all that wait look at who is gone, and whether the network is whole."""
        for group in self.groups:
            for call in group.calls.values():
                call.changed.set()

    @property
    def is_whole(self) -> bool:
        """Whether each of its hosts reaches the others."""
        hosts = dict.fromkeys(self.hosts.values())
        return len(hosts) < 2 or all(a.reaches(b) for a in hosts for b in hosts)

    @property
    def has_broken(self) -> bool:
        """Whether the rank that asks has heard that another one is gone."""
        own = CLOCK.process.supervisor.host
        return any(self.hosts.get(rank, own).reaches(own) for rank in self.gone)


class _Group:
    """The calls of one process group, each by its number."""

    def __init__(self, meeting: Meeting, name: str, *, breaks: bool) -> None:
        self.meeting, self.name, self.breaks = meeting, name, breaks
        self.numbers: dict[int, int] = {}  # of the ranks' next calls
        self.calls: dict[int, _Call] = {}

    def enter(self, kind: str, value: Any = None) -> "_Call":
        """Begin a call; it is over once the others have begun it, too."""
        rank, meeting = CLOCK.process.rank, self.meeting
        number = self.numbers.get(rank, 0)
        self.numbers[rank] = number + 1
        call = self.calls.get(number)
        if call is None:
            call = self.calls[number] = _Call(self, kind)
        if kind != call.kind:
            known = f"rank {next(iter(call.values))} in {call.kind}"
            how = f"rank {rank} in {kind}, {known}"
            meeting.host.world.breaks("all ranks call alike", how)
            sleep(float("inf"))
        call.values[rank] = value
        if len(call.values) == meeting.size and meeting.is_whole:
            self.calls.pop(number)
            call.changed.set()
        return call


class _Call:
    """One collective call, as torch's Work."""

    def __init__(self, group: _Group, kind: str) -> None:
        self.group, self.kind = group, kind
        self.values: dict[int, Any] = {}
        self.changed = Event()
        self.put: dict[int, Callable[[], None]] = {}
        self._is_heard = False

    def wait(self, timeout: timedelta | None = None) -> "_Call":
        group, until = self.group, CLOCK.now + (timeout or timedelta.max).total_seconds()
        while not self.is_over:
            if group.breaks and group.meeting.gone and group.meeting.has_broken:
                sleep(CLOCK.luck.uniform(0.001, 0.3))
                raise RuntimeError(f"[{group.name}] Connection closed by peer")
            if CLOCK.now >= until:
                raise RuntimeError(f"[{group.name}] Timed out waiting {timeout} for operations")
            self.changed.clear()
            self.changed.wait(until - CLOCK.now)
        sleep(CLOCK.luck.uniform(0.0001, 0.002))
        if (put := self.put.pop(CLOCK.process.rank, None)) is not None:
            put()
        return self

    @property
    def is_over(self) -> bool:
        """Whether all have entered it, and all have heard of that."""
        if len(self.values) < self.group.meeting.size:
            return False
        self._is_heard = self._is_heard or self.group.meeting.is_whole
        return self._is_heard

    @property
    def in_order(self) -> list[Any]:
        return [self.values[rank] for rank in range(self.group.meeting.size)]


def _group(given: Any) -> _Group:
    gloo, nccl = CLOCK.process.meeting.groups
    return nccl if given is None else gloo


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype}{[*tensor.shape]}"


def _all_reduce(
    tensor: Tensor, op: str = "sum", group: Any = None, async_op: bool = False
) -> _Call | None:
    call = _group(group).enter(f"all_reduce {op} {_shape(tensor)}", tensor.clone())

    def put() -> None:
        values = torch.stack(call.in_order)
        tensor.copy_(values.sum(0) if op == "sum" else values.amax(0))

    call.put[CLOCK.process.rank] = put
    return call if async_op else call.wait() and None


def _broadcast(tensor: Tensor, src: int, group: Any = None) -> None:
    call = _group(group).enter(f"broadcast {_shape(tensor)}", tensor.clone())
    tensor.copy_(call.wait().values[src])


def _broadcast_objects(box: list[Any], src: int, group: Any) -> None:
    rank = CLOCK.process.rank
    call = _group(group).enter("broadcast object", pickle.dumps(box[0]) if rank == src else b"")
    box[0] = pickle.loads(call.wait().values[src])


def _all_gather_objects(found: list[Any], value: Any, group: Any) -> None:
    call = _group(group).enter("all_gather object", pickle.dumps(value))
    found[:] = [pickle.loads(each) for each in call.wait().in_order]


def _barrier(group: Any = None, async_op: bool = False) -> _Call | None:
    call = _group(group).enter("barrier")
    return call if async_op else call.wait() and None


def _init(backend: str, **_: Any) -> None:
    """Wait for all others; there is no connection yet that one who ends could break."""
    del backend
    meeting = CLOCK.process.meeting
    call = meeting.groups[1].enter("init")
    while not call.is_over:
        call.changed.clear()
        call.changed.wait()


def _new_group(**_: Any) -> _Group:
    group: _Group = CLOCK.process.meeting.groups[0]
    group.enter("new group").wait()
    return group


def _leave() -> None:
    CLOCK.process.meeting.lose(CLOCK.process.rank)


class _Notes:
    """The store by which ranks meet: any of them reads and writes it, without waiting."""

    def __init__(self, name: str, store: Any) -> None:
        del name, store
        self._notes = CLOCK.process.meeting.notes

    def set(self, key: str, text: str) -> None:
        self._notes[key] = text

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._notes for key in keys)

    def get(self, key: str) -> bytes:
        return self._notes[key].encode()


def _rendezvous(address: str, rank: int, size: int, **_: Any) -> Iterator[Any]:
    process = CLOCK.process
    if process.meeting is None:  # the hosts have agreed on an address (hosts.py)
        process.meeting = process.supervisor.host.meeting_at(address, size)
        process.meeting.hosts[rank] = process.supervisor.host
    yield SimpleNamespace(set_timeout=lambda _: None), 0, 0


class _Queue:
    """queue.SimpleQueue, of which one thread waits."""

    def __init__(self) -> None:
        self._items, self._changed = deque[Any](), Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._changed.set()

    def get(self, timeout: float) -> Any:
        if not self._items and not self._changed.wait(timeout):
            raise queue.Empty
        return self._items.popleft()


DIST = SimpleNamespace(
    ReduceOp=SimpleNamespace(MAX="max"),
    DistError=torch.distributed.DistError,
    ProcessGroup=_Group,
    init_process_group=_init,
    new_group=_new_group,
    destroy_process_group=_leave,
    all_reduce=_all_reduce,
    broadcast=_broadcast,
    broadcast_object_list=_broadcast_objects,
    all_gather_object=_all_gather_objects,
    barrier=_barrier,
)
STUBS: tuple[tuple[Any, str, Any], ...] = (
    (world_file, "dist", DIST),
    (world_file, "rendezvous", _rendezvous),
    (world_file, "PrefixStore", _Notes),
    (world_file, "queue", SimpleNamespace(SimpleQueue=_Queue, Empty=queue.Empty)),
)


def watch(process: Process) -> None:
    """Wait for a rank's process to end, of which the others' connections tell."""
    process.ended.wait()
    if process.meeting is not None:
        process.meeting.lose(process.rank)
