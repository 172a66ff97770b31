"""The lease: one writer at a time, despite lost responses and wrong clocks."""

import json
import math
import threading
import time
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.keys import EVENTS
from training.durable.errors import InterruptedRunError
from training.durable.record.head import CheckpointEntry, Head, Kind, checkpoint_name
from training.durable.record.lease import Lease, LeaseLostError, acquire, mark_failed
from training.durable.store.folder import FolderStore, open_store
from training.durable.store.protocol import PreconditionFailedError, Store, StoreError
from training.durable.store.transfer import FileEntry


def take(
    store: Store, writer: str, ttl_seconds: float = 0.3, waits: list[float] | None = None
) -> Lease:
    """Take the run over; `waits` gets the seconds of each wait for the holder."""

    def wait(seconds: float) -> bool:
        if waits is not None:
            waits.append(seconds)
        time.sleep(seconds)
        return False

    lease = acquire(store, "run-1", writer, ttl_seconds, wait, lambda holder: None)
    assert isinstance(lease, Lease)
    return lease


def entry(step: int, stage: str = "a", kind: Kind = "periodic") -> CheckpointEntry:
    return CheckpointEntry(
        name=f"{step:08d}-g0001-{ord(stage):x}",
        step=step,
        stage=stage,
        epoch=0,
        kind=kind,
        files=(),
    )


def test_a_released_run_is_taken_over_at_once(store_uri: str) -> None:
    store = open_store(store_uri)
    take(store, "i-1", 60).release()
    waits: list[float] = []
    assert take(store, "i-2", 60, waits).head.generation == 2
    assert waits == []


def test_a_silent_writer_is_replaced_after_one_ttl_and_cannot_write(store_uri: str) -> None:
    store = open_store(store_uri)
    stale = take(store, "i-1")
    began = time.monotonic()
    lease = take(store, "i-2", 0.3)
    assert time.monotonic() - began >= 0.3
    with pytest.raises(LeaseLostError):
        stale.publish(entry(1))
    assert stale.lost.is_set()
    assert Head.read(store) == lease.head
    assert lease.head.checkpoints == ()


def test_a_writer_with_a_heartbeat_is_waited_for(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    holder = take(store, "i-1", 0.3)
    holder.start_heartbeat()
    released = threading.Event()

    def release() -> None:
        released.set()
        holder.release()

    threading.Timer(1.0, release).start()
    second = take(store, "i-2", 0.3)
    assert released.is_set(), "three TTLs and more"
    assert second.head.generation == 2
    assert not holder.lost.is_set()


def test_the_heartbeat_notices_that_the_lease_is_lost(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    holder = take(store, "i-1", 0.3)
    take(store, "i-2", 0.1)
    holder.start_heartbeat()
    assert holder.lost.wait(120)
    with pytest.raises(LeaseLostError):
        holder.check()


def test_a_notice_ends_the_wait(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    take(store, "i-1")
    with pytest.raises(InterruptedRunError):
        acquire(store, "run-1", "i-2", 60, lambda seconds: True, lambda holder: None)


def test_a_precondition_failure_with_our_nonce_is_success(tmp_path: Path) -> None:
    class Twice(FolderStore):
        """The write happens, its response is lost, and the retry finds its own write."""

        def put_if(self, key: str, data: bytes, etag: str | None) -> str:
            super().put_if(key, data, etag)
            raise PreconditionFailedError(key)

    lease = take(Twice(tmp_path), "i-1")
    assert Head.read(FolderStore(tmp_path)) == lease.head


def test_a_checkpoint_that_cannot_be_deleted_keeps_no_other_one(tmp_path: Path) -> None:
    class Stubborn(FolderStore):
        def delete_below(self, prefix: str) -> None:
            if entry(1).name in prefix:
                raise StoreError(f"{prefix}: 403 Forbidden")
            super().delete_below(prefix)

    store = Stubborn(tmp_path)
    lease = take(store, "i-1")
    for step in range(1, 7):
        store.put(f"checkpoints/{entry(step).name}/state.json", b"{}")
        lease.publish(entry(step))
        lease.delete_unkept()
    left = {entry(step).name for step in (1, 4, 5, 6)}
    assert store.folders("checkpoints/") == left
    lease.release()
    store.put("checkpoints/00000009-g0001-dead/state.json", b"{}")
    take(store, "i-2").sweep()
    assert store.folders("checkpoints/") == left


def test_marking_failed_shuts_the_holder_out_and_spares_a_finished_run(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    holder = take(store, "i-1")
    assert mark_failed(store, "run-1", "i-1", "restarts used up").reason == "restarts used up"
    with pytest.raises(LeaseLostError):
        holder.publish(entry(1))
    other = FolderStore(tmp_path / "other")
    take(other, "i-1").finish("abc")
    assert mark_failed(other, "run-1", "i-1", "late").state == "finished"
    head = acquire(other, "run-1", "i-2", 0.1, lambda seconds: False, lambda holder: None)
    assert isinstance(head, Head) and head.state == "finished"


def test_fails_to_mark_a_run_failed_whose_head_is_gone(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put(f"checkpoints/{entry(1).name}/state.json", b"{}")
    with pytest.raises(UserError, match=r"no head\.json; restore its last version"):
        mark_failed(store, "run-1", "i-2", "training failed (exit status 2)")
    assert Head.read(store) is None, "a new head would name no checkpoint of the old one"


def test_generations_that_wrote_before_their_head_was_deleted_are_not_used_again(
    tmp_path: Path,
) -> None:
    store = FolderStore(tmp_path)
    for number in (1, 2):
        take(store, f"i-{number}").release()
        store.put(f"{EVENTS}20261129T12000{number}.000000Z-i-{number}-take-over.json", b"{}")
    (tmp_path / "head.json").unlink()
    assert take(store, "i-3").head.generation == 3
    (tmp_path / "head.json").unlink()
    assert mark_failed(store, "run-1", "i-3", "training failed").generation == 2


def test_fails_to_begin_anew_where_the_head_is_deleted_while_a_machine_waits(
    tmp_path: Path,
) -> None:
    store = FolderStore(tmp_path)
    take(store, "i-1").publish(entry(1))
    store.put(f"checkpoints/{entry(1).name}/state.json", b"{}")

    def wait(seconds: float) -> bool:
        (tmp_path / "head.json").unlink()
        return False

    with pytest.raises(UserError, match=r"no head\.json; restore its last version"):
        acquire(store, "run-1", "i-2", 30.0, wait, lambda holder: None)
    assert Head.read(store) is None, "its first sweep would delete what the head named"


def edited_head(path: str = "", value: object = None) -> bytes:
    """A head with one checkpoint of one file, and another value at a path of the JSON."""
    file = FileEntry(name="state.json", bytes=2, sha256="ab", part_bytes=8)
    one = CheckpointEntry(
        name=checkpoint_name(7, 3), step=7, stage="a", epoch=0, kind="periodic", files=(file,)
    )
    head = Head(run_id="r", generation=3, writer="i", nonce="n", checkpoints=(one,))
    record = json.loads(head.to_bytes())
    if path:
        *parents, last = (
            path.replace("entry", "checkpoints/0").replace("file", "files/0").split("/")
        )
        target = record
        for name in parents:
            target = target[int(name) if name.isdecimal() else name]
        target[last] = value
    return json.dumps(record).encode()


def test_a_head_comes_back_as_it_was_written() -> None:
    head = Head.from_bytes(edited_head())
    assert head.checkpoints[0].step == 7
    assert Head.from_bytes(head.to_bytes()) == head


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(
            ("entry/name", name)
            for name in ["", ".", "..", "../../x", "/x", "x", "00000007-g0003-ab/..", 7]
        ),
        *(("entry/file/name", name) for name in ["", ".", "..", "../head.json", "/x", "a/b", 7]),
        ("entry/file/bytes", -1),
        ("entry/file/bytes", "2"),
        ("entry/file/part_bytes", 0),
        ("entry/file/part_bytes", -8),
        ("entry/step", "7"),
        ("entry/step", math.inf),
        ("entry/epoch", None),
        ("entry/failed_starts", 0.5),
        ("entry/kind", "other"),
        ("heartbeat", None),
        ("heartbeat", math.nan),
        ("skipped_steps", [None]),
        ("generation", "3"),
        ("generation", None),
        ("state", "asleep"),
        ("checkpoints", [None]),
        ("checkpoints", "x"),
    ],
)
def test_fails_for_a_head_that_says_what_no_writer_wrote(path: str, value: object) -> None:
    with pytest.raises(UserError, match=r"^head\.json is damaged or was edited \("):
        Head.from_bytes(edited_head(path, value))


def test_fails_for_a_head_that_names_a_checkpoint_twice() -> None:
    record = json.loads(edited_head())
    record["checkpoints"] *= 2
    with pytest.raises(UserError, match="is named twice"):
        Head.from_bytes(json.dumps(record).encode())
