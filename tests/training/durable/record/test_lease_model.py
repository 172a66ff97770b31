"""The lease against a model: several writers, lost and late answers, zombies, clocks that disagree.

Hypothesis draws what happens in which order and shrinks what breaks a promise to its shortest form.
"""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contract.keys import HEAD
from training.durable.errors import InterruptedRunError
from training.durable.record import lease
from training.durable.record.head import CheckpointEntry, Head
from training.durable.record.lease import Lease, LeaseLostError, acquire, mark_failed
from training.durable.store import protocol
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import AnswerLostError, PreconditionFailedError, StoreError

TTL_SECONDS = 3.0
# What may become of a conditional write: done, done and not answered, not done and not answered,
# still on its way when the client has given up on it, refused because of another one under way.
FAULTS = st.lists(st.sampled_from(["ok", "lost", "undone", "late", "409"]), max_size=8)


class Clock:
    """Stands for `time` in training/durable/record: sleeping takes no time here."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def on_clock(clock: Clock) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (lease, protocol):
            stack.enter_context(mock.patch.object(module, "time", clock))
        yield


class Recorder(FolderStore):
    """The store itself: whatever head and receipt it accepted, and no file deleted while named."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.heads: list[Head] = []
        self.receipts: list[int] = []  # the generations that wrote one

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        tag = super().put_if(key, data, etag)
        if key == HEAD:
            self.heads.append(Head.from_bytes(data))
        else:
            self.receipts.append(int(data))
        return tag

    def delete_below(self, prefix: str) -> None:
        head = Head.read(self)
        named = {entry.name for entry in head.checkpoints} if head else set()
        assert prefix.split("/")[1] not in named, f"{prefix} is deleted and the head names it"
        super().delete_below(prefix)


@dataclass
class Client:
    """One machine's view of the store, through a network that breaks conditional writes."""

    store: Recorder
    late: list[Callable[[], object]]
    faults: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        fault = self.faults.pop(0) if self.faults else "ok"
        if fault in ("ok", "lost"):
            tag = self.store.put_if(key, data, etag)
            if fault == "ok":
                return tag
        if fault == "late":
            self.late.append(lambda: self.store.put_if(key, data, etag))
        raise AnswerLostError(f"{key}: {fault}")


@dataclass
class Holder:
    """A lease that was once granted; nothing tells its owner when that ends."""

    lease: Lease
    client: Client
    is_let_go: bool = False  # its owner released, finished or failed it: it acts no more


class Writers(RuleBasedStateMachine):
    """Any holder, dead for long or not, may act at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = Recorder(self.folder)
        self.late: list[Callable[[], object]] = []
        self.holders: list[Holder] = []
        self.published: list[tuple[int, str]] = []  # length of the history, name
        self.num_names = 0
        self.patch = on_clock(Clock())
        self.patch.__enter__()

    def teardown(self) -> None:
        self.patch.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    @rule(faults=FAULTS, beats=st.lists(st.booleans(), max_size=6), clock=st.floats(0.5, 20))
    def candidate(self, faults: list[str], beats: list[bool], clock: float) -> None:
        """A machine with a clock of its own waits; the holders beat now and then, or no more."""
        client = Client(self.store, self.late, faults)
        time, waits = Clock(), list(beats)

        def wait(seconds: float) -> bool:
            time.now += seconds * clock
            if waits and waits.pop(0):
                for number in range(len(self.holders)):
                    self.act(number, [], lambda holder: holder.lease.beat())
            return time.now > 100 * TTL_SECONDS

        with on_clock(time):
            try:
                lease = acquire(
                    client,  # type: ignore[arg-type]
                    "run-1",
                    f"i-{len(self.holders)}",
                    TTL_SECONDS,
                    wait,
                    lambda holder: None,
                )
            except (InterruptedRunError, StoreError):
                return
        if isinstance(lease, Lease):
            self.holders.append(Holder(lease, client))
        else:
            assert lease.state in ("finished", "failed")

    @precondition(lambda self: self.holders)
    @rule(faults=FAULTS, data=st.data(), release=st.booleans())
    def publish(self, faults: list[str], data: st.DataObject, release: bool) -> None:
        def act(holder: Holder) -> None:
            self.num_names += 1
            generation = holder.lease.head.generation
            name = f"{self.num_names:08d}-g{generation:04d}-{self.num_names:08x}"
            self.store.put(f"checkpoints/{name}/state.json", b"{}")
            entry = CheckpointEntry(
                name=name, step=self.num_names, stage="a", epoch=0, kind="periodic", files=()
            )
            try:
                holder.lease.publish(entry, release=release)
            except StoreError:
                holder.lease.abandon(name)
                raise
            holder.is_let_go = release
            assert name in {e.name for head in self.store.heads for e in head.checkpoints}

        self.act(self.draw(data), faults, act)

    @precondition(lambda self: self.holders)
    @rule(
        faults=FAULTS,
        data=st.data(),
        what=st.sampled_from(
            [
                *("beat", "beat", "sweep", "delete_unkept", "delete_unkept", "release"),
                *("count_unverified", "forget_unverified"),
            ]
        ),
    )
    def something(self, faults: list[str], data: st.DataObject, what: str) -> None:
        def act(holder: Holder) -> None:
            holder.is_let_go = what == "release"
            getattr(holder.lease, what)()

        self.act(self.draw(data), faults, act)

    @precondition(lambda self: self.holders)
    @rule(faults=FAULTS, data=st.data())
    def write_receipt(self, faults: list[str], data: st.DataObject) -> None:
        def act(holder: Holder) -> None:
            generation = holder.lease.head.generation
            if holder.lease.head.is_ended or holder.lease.head.state != "running":
                return
            holder.lease.put("receipt.json", str(generation).encode())
            found = self.store.get("receipt.json")
            assert found is not None
            assert int(found.data) >= generation

        self.act(self.draw(data), faults, act)

    @precondition(lambda self: len(self.holders) > 2)
    @rule(faults=FAULTS, data=st.data(), what=st.sampled_from(["finish", "fail", "mark"]))
    def end(self, faults: list[str], data: st.DataObject, what: str) -> None:
        if what == "mark":
            try:
                mark_failed(self.store, "run-1", "console", "asked for")
            except StoreError:
                return

        def act(holder: Holder) -> None:
            holder.is_let_go = True
            getattr(holder.lease, what)("text")

        if what != "mark":
            self.act(self.draw(data), faults, act)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def a_late_write_arrives(self, data: st.DataObject) -> None:
        write = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        try:
            write()
        except PreconditionFailedError:
            return

    @invariant()
    def generations_have_one_writer_each(self) -> None:
        for before, after in self.steps():
            assert after.generation - before.generation in (0, 1)
            if after.generation == before.generation and after.writer != before.writer:
                raise AssertionError(f"generation {after.generation} has two writers")

    @invariant()
    def no_stale_writer_replaces_what_its_successor_wrote(self) -> None:
        assert self.store.receipts == sorted(self.store.receipts)

    @invariant()
    def an_end_is_the_end(self) -> None:
        for before, _ in self.steps():
            assert before.state not in ("finished", "failed")

    @invariant()
    def a_checkpoint_goes_only_by_retention_and_its_files_stay(self) -> None:
        for before, after in self.steps():
            old, new = [e.name for e in before.checkpoints], [e.name for e in after.checkpoints]
            added = [name for name in new if name not in old]
            assert len(added) <= 1
            assert all(f"-g{after.generation:04d}-" in name for name in added)
            left = [e.name for e in after.checkpoints if e.is_left_behind]
            own = [name for name in (*old, *added) if name not in left]
            gone = {e.name for e in before.checkpoints if e.is_left_behind} - {*left}
            kept = [name for name in own if name not in gone]
            assert new == [*left, *kept[-3:]], "the newest three of one stage are kept"
            assert not gone or len(kept) > 3, "what is left behind stays until there are more"
        head = Head.read(self.store)
        for entry in head.checkpoints if head else ():
            assert self.store.get(f"checkpoints/{entry.name}/state.json"), f"{entry.name} is gone"

    @invariant()
    def a_run_starts_over_only_where_two_machines_agree(self) -> None:
        """On the same checkpoints, the second being the one that starts over."""
        for before, after in self.steps():
            old = {e.name for e in before.checkpoints if not e.is_left_behind}
            if old & {e.name for e in after.checkpoints if e.is_left_behind}:
                assert {*before.unverified_by} - {after.writer}
                assert {e.name for e in before.checkpoints} == {e.name for e in after.checkpoints}
                assert not after.unverified_by
            elif added := {*after.unverified_by} - {*before.unverified_by}:
                assert added == {after.writer}

    @invariant()
    def no_lease_is_lost_unless_somebody_else_wrote(self) -> None:
        newest = self.store.heads[-1] if self.store.heads else None
        for holder in self.holders:
            if newest and holder.lease.lost.is_set() and not newest.is_ended:
                assert newest.generation > holder.lease.head.generation

    def steps(self) -> Sequence[tuple[Head, Head]]:
        return list(itertools.pairwise(self.store.heads))

    def draw(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.holders) - 1))

    def act(self, number: int, faults: list[str], act: Callable[[Holder], None]) -> None:
        holder = self.holders[number]
        holder.client.faults[:] = faults
        if holder.is_let_go:
            return
        try:
            act(holder)
        except LeaseLostError:
            assert holder.lease.lost.is_set()
        except StoreError:
            holder.is_let_go = False  # whatever it tried, it does not know; it may try again


Writers.TestCase.settings = settings(
    max_examples=80, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
TestWriters = pytest.mark.filterwarnings("default")(Writers.TestCase)
