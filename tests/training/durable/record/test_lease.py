"""One lease that several threads use, and what becomes of what an unanswered write has dropped."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.keys import CHECKPOINTS, checkpoint_prefix
from tests.training.durable.save.scene import take_lease
from training.durable.record.head import CheckpointEntry, Head, checkpoint_name
from training.durable.record.lease import Lease
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import AnswerLostError, Stored, StoreError


class Faulty(FolderStore):
    """Loses the answer to a write of the head, and to a look at it, or holds it up."""

    loses_answer = is_silent = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.is_at_gate = threading.Event(), threading.Event()
        self.gate.set()

    def get(self, key: str) -> Stored | None:
        if self.is_silent:
            raise StoreError(f"{key}: no answer")
        return super().get(key)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        self.is_at_gate.set()
        assert self.gate.wait(60)
        found = super().put_if(key, data, etag)
        self.is_silent = self.loses_answer
        if self.is_silent:
            raise AnswerLostError(f"{key}: no answer")
        return found


@pytest.fixture
def store(tmp_path: Path) -> Faulty:
    return Faulty(tmp_path / "run")


def entry(step: int) -> CheckpointEntry:
    name = checkpoint_name(step, 1)
    return CheckpointEntry(name=name, step=step, stage="a", epoch=0, kind="periodic", files=())


def publish(store: Faulty, lease: Lease, step: int) -> None:
    new = entry(step)
    store.put(f"{checkpoint_prefix(new.name)}state.json", b"{}")
    lease.publish(new)


def head_of(store: Faulty) -> Head:
    head = Head.read(store)
    assert head is not None
    return head


def test_what_an_unanswered_write_dropped_is_deleted(store: Faulty) -> None:
    lease = take_lease(store, "machine-0")
    for step in (1, 2, 3):
        publish(store, lease, step)
    store.loses_answer = True
    with pytest.raises(StoreError, match="no answer"):
        publish(store, lease, 4)
    store.loses_answer = store.is_silent = False
    for step in (5, 6):
        publish(store, lease, step)
    lease.delete_unkept()
    named = {each.name for each in head_of(store).checkpoints}
    assert {name.rstrip("/") for name in store.folders(CHECKPOINTS)} == named


def behind(store: Faulty, first: Callable[[], object], second: Callable[[], object]) -> None:
    """Let one thread write the head while another one waits to do so."""
    store.is_at_gate.clear()
    store.gate.clear()
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert store.is_at_gate.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    store.gate.set()
    for each in threads:
        each.join(60)


def test_a_release_behind_a_failure_does_not_undo_it(store: Faulty) -> None:
    lease = take_lease(store, "machine-0")
    behind(store, lambda: lease.fail("it is wrong"), lease.release)
    assert (head_of(store).state, head_of(store).reason) == ("failed", "it is wrong")


def test_a_commit_behind_a_release_is_refused(store: Faulty) -> None:
    lease, said = take_lease(store, "machine-0"), list[str]()

    def commit() -> None:
        try:
            lease.publish(entry(1))
        except StoreError as error:
            said.append(str(error))

    behind(store, lease.release, commit)
    assert (head_of(store).state, head_of(store).checkpoints) == ("released", ())
    assert said == [f"{store.uri} is released: this is not committed"]


def test_no_error_ends_the_heartbeats_of_a_lease_that_is_held(
    store: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take_lease(store, "a")
    beat, met, has_beaten = lease.beat, [TypeError("unforeseen")], threading.Event()

    def fails_once() -> None:
        if met:
            raise met.pop()
        beat()
        has_beaten.set()

    monkeypatch.setattr(lease, "beat", fails_once)
    lease.start_heartbeat()
    assert has_beaten.wait(60)
    lease.close()
