"""The newest snapshot that holds comes back; whatever is damaged is passed over by name."""

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from contract.errors import UserError
from contract.keys import blob_key, blob_of
from tests.training.durable.save.scene import (
    PATIENCE_SECONDS,
    Machine,
    NewMachine,
    entries,
    tree,
    wait_for_snapshot,
    wait_until,
)
from training.durable.errors import MachineError
from training.durable.record.metrics import Events
from training.durable.save.snapshots import restore
from training.durable.save.snapshots.folder_saves import Blobs
from training.durable.save.snapshots.snapshot import (
    Content,
    FolderManifest,
    SavedFile,
    read_manifest,
)
from training.durable.store.folder import FolderStore, _FileUpload
from training.durable.store.protocol import Store, StoreError


@pytest.fixture
def two(new_machine: NewMachine) -> Machine:
    """A run with two snapshots, each with a file in parts and a pack of its own."""
    machine = new_machine("first")
    machine.mirror.start()
    for number in (1, 2):
        machine.save({"large": os.urandom(9_000_000), "a": b"%d" % number, "b": os.urandom(500)})
    machine.vanish()
    return machine


def blobs_of(store: Store, number: int) -> list[Path]:
    """The files of a snapshot's blobs that the other one does not use."""
    found = [read_manifest(store, entry).blobs for entry in entries(store)]
    own = found[number].keys() - found[1 - number].keys()
    return [Path(store.uri) / "blobs" / blob for blob in sorted(own)]


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_snapshot_is_passed_over_and_says_why(
    two: Machine, new_machine: NewMachine, store: Store, which: int, damage: str
) -> None:
    json_file = Path(store.uri) / "checkpoints" / entries(store)[1].name / "snapshot.json"
    path = [*blobs_of(store, 1), json_file][which]
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage != "missing":
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    machine = new_machine("second")
    assert machine.step == 1
    assert (machine.folder / "a").read_bytes() == b"1"
    ((name, why),) = machine.passed_over
    assert name == entries(store)[1].name
    words = ("does not match its SHA-256", "missing", "ends before byte")
    assert any(word in why for word in words)


def test_what_no_snapshot_survives_on_this_machine_deletes_none(
    two: Machine, new_machine: NewMachine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FolderStore.read_into

    def read_badly(self: FolderStore, key: str, start: int, data: memoryview) -> None:
        read(self, key, start, data)
        data[0] ^= 1

    before = store.sizes("blobs/")
    with monkeypatch.context() as bad_memory:
        bad_memory.setattr(FolderStore, "read_into", read_badly)
        with pytest.raises(
            MachineError, match=r"none of the 2 checkpoints of .* all of them are kept"
        ):
            new_machine("second")
    assert store.sizes("blobs/") == before
    assert new_machine("third").step == 2


def test_a_second_machine_that_can_verify_none_either_starts_over_and_deletes_none(
    two: Machine, new_machine: NewMachine, store: Store
) -> None:
    for path in (Path(store.uri) / "blobs").iterdir():
        path.write_bytes(b"?" * path.stat().st_size)
    before, names = store.sizes(""), [entry.name for entry in entries(store)]
    for _ in range(2):  # however often one machine tries
        with pytest.raises(MachineError, match="reopen --from-scratch"):
            new_machine("second")
    third = new_machine("third")
    assert third.restored is None
    assert list(third.folder.iterdir()) == []
    third.mirror.start()
    kept = {key: size for key, size in before.items() if key.startswith(("blobs/", "checkpoints/"))}
    for number in (1, 2, 3):
        third.save({"a": b"new %d" % number})
        third.lease.sweep()
        third.mirror._blobs.sweep()
        assert kept.items() <= store.sizes("").items()
        assert [one.name for one in entries(store) if one.is_left_behind] == names
    third.save({"a": b"new 4"})
    third.vanish()
    assert [one.step for one in entries(store)] == [4, 5, 6]
    fourth = new_machine("fourth")
    assert not kept.keys() & store.sizes("").keys()
    assert fourth.step == 6
    told = Events.read(store, "none-valid")
    assert [(one["instance_id"], one["starts_over"]) for one in told] == [
        ("second", False),
        ("second", False),
        ("third", True),
    ]
    assert [one["name"] for one in told[0]["passed_over"]] == names[::-1]


def test_a_machine_that_can_verify_one_takes_the_other_s_word_back(
    two: Machine, new_machine: NewMachine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_nothing(self: FolderStore, key: str, start: int, data: memoryview) -> None:
        data[:] = bytes(len(data))

    for name in ("second", "third", "fourth"):
        with monkeypatch.context() as bad_memory:
            bad_memory.setattr(FolderStore, "read_into", read_nothing)
            with pytest.raises(MachineError):
                new_machine(name)
        well = new_machine("well")
        assert well.step == 2
        well.vanish()


@pytest.fixture
def sharing(new_machine: NewMachine) -> Machine:
    """A run whose three snapshots share a file in parts and a pack."""
    machine = new_machine("first")
    machine.mirror.start()
    for number in (1, 2, 3):
        shared = {} if number > 1 else {"base": os.urandom(9_000_000), "vocabulary": b"words"}
        machine.save({**shared, "a": b"%d" % number})
    wait_until(
        lambda: sum(key.endswith(".second") for key in machine.store.sizes("blobs/")) == 2,
        machine.mirror,
    )
    machine.vanish()
    return machine


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
def test_what_all_snapshots_share_survives_its_damage(
    sharing: Machine, new_machine: NewMachine, store: Store, damage: str
) -> None:
    snapshots = [read_manifest(store, entry) for entry in entries(store)]
    shared = set.intersection(*(set(one.blobs) for one in snapshots))
    assert len(shared) == 2
    for blob in shared:
        path = Path(store.uri) / "blobs" / blob
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.unlink()
        if damage != "missing":
            path.write_bytes(data if damage == "flipped" else data[:-1])
    second = new_machine("second")
    assert second.step == 3
    assert tree(second.folder) == tree(sharing.folder)
    second.mirror.start()
    second.save({"a": b"4"})
    newest = read_manifest(store, entries(store)[-1])
    assert not shared & newest.blobs.keys(), "what was damaged is sent again"
    second.vanish()
    assert tree(new_machine("third").folder) == tree(second.folder)


def test_a_second_copy_goes_with_its_blob_and_is_made_once(
    sharing: Machine, new_machine: NewMachine, store: Store
) -> None:
    def written() -> dict[str, int]:
        paths = Path(store.uri, "blobs").glob("*.second")
        return {path.name: path.stat().st_mtime_ns for path in paths}

    before = written()
    second = new_machine("second")
    second.mirror.start()
    for number in range(4, 8):
        second.save({"a": b"%d" % number})
    assert written() == before
    (second.folder / "base").unlink()
    (second.folder / "vocabulary").unlink()
    for number in range(8, 12):
        second.save({"a": b"%d" % number})
    wait_until(lambda: not written(), second.mirror)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_second_copy_that_arrives_while_its_blob_is_deleted_goes_too(
    new_machine: NewMachine, store: Store, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """Seed 60555: it arrived between the deletion and its answer, and stayed for ever."""
    machine, is_deleted = new_machine("first"), threading.Event()
    finish, delete = _FileUpload.finish, FolderStore.delete
    machine.mirror.start()
    machine.save({"base": os.urandom(9_000_000), "a": b"1"})
    base = max(store.sizes("blobs/"), key=store.sizes("blobs/").__getitem__)

    def late(self: _FileUpload) -> None:
        assert self._target.suffix != ".second" or is_deleted.wait(PATIENCE_SECONDS)
        if self._target.suffix == ".second" and is_stopped:
            machine.mirror._blobs.stop_copying.set()
        finish(self)

    def answered_late(self: FolderStore, keys: Iterable[str]) -> None:
        keys = list(keys)
        delete(self, keys)
        if f"{base}.second" in keys and not is_deleted.is_set():
            is_deleted.set()
            with machine.mirror._blobs._copying:  # the copy has arrived
                pass

    monkeypatch.setattr(_FileUpload, "finish", late)
    monkeypatch.setattr(FolderStore, "delete", answered_late)
    for number in (2, 3):
        machine.save({"a": b"%d" % number})
    (machine.folder / "base").unlink()
    for number in (4, 5, 6):
        machine.save({"a": b"%d" % number})
    assert is_deleted.wait(PATIENCE_SECONDS)
    with machine.mirror._blobs._copying:
        pass
    machine.vanish()
    assert f"{base}.second" not in store.sizes("blobs/")


def test_of_a_snapshot_that_cannot_be_read_later_generations_hold_nothing(store: Store) -> None:
    """Seed 83117: not a blob was deleted while the head named one, for the rest of the run."""
    unread, read = (
        SimpleNamespace(name="00000001-g0002-00"),
        SimpleNamespace(name="00000005-g0003-00"),
    )
    own = [f"g{generation:04d}-{number:016x}" for generation in (1, 2, 3) for number in (1, 2)]
    for blob in own:
        store.put(blob_key(blob), b"1")
    lease = SimpleNamespace(head=SimpleNamespace(checkpoints=[unread, read]))
    blobs = Blobs(store, lease)  # type: ignore[arg-type]
    for needed in (own, own[-1:]):  # by an earlier one, and by the one that is left
        blobs.add(read.name, SimpleNamespace(blobs=dict.fromkeys(needed, 1)))  # type: ignore[arg-type]
    blobs.delete_unneeded()
    assert [blob_of(key) for key in sorted(store.sizes("blobs/"))] == [*own[:4], own[-1]]


def test_a_damaged_blob_is_found_before_all_snapshots_need_it_and_is_sent_again(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("first")
    machine.mirror.start()
    machine.save({"base": os.urandom(9_000_000), "a": b"1"})
    for path in Path(store.uri, "blobs").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    for number in (2, 3, 4):
        machine.save({"a": b"%d" % number})
        if number > 2:
            wait_until(lambda: machine.mirror._blobs._damaged, machine.mirror)
    machine.vanish()
    second = new_machine("second")
    assert second.step == 4
    assert tree(second.folder) == tree(machine.folder)


def test_what_the_store_refuses_to_read_is_not_a_new_start(
    two: Machine, new_machine: NewMachine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FolderStore, key: str, start: int, data: memoryview) -> None:
        raise StoreError(f"{key}: 503")

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "read_into", refuse)
        with pytest.raises(StoreError, match="the run is kept"):
            new_machine("second")
    assert new_machine("third").step == 2


def test_a_restore_that_was_killed_is_done_again(
    two: Machine, new_machine: NewMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = FolderStore.read_into, []

    def die(self: FolderStore, key: str, start: int, data: memoryview) -> None:
        calls.append(key)
        if len(calls) > 1:
            raise KeyboardInterrupt
        read(self, key, start, data)

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "read_into", die)
        with pytest.raises(KeyboardInterrupt):
            new_machine("second")
    assert tree(new_machine("second").folder) == tree(two.folder)


def test_fails_in_one_sentence_where_the_folder_is_somebody_elses(
    two: Machine, new_machine: NewMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(UserError, match=r"cannot be restored into .*not permitted.*; use another"):
        new_machine("second")


@pytest.mark.parametrize(("blocks", "error"), [(2, UserError), (2**20, MachineError)])
def test_a_disk_too_small_is_the_users_fault_and_one_full_of_other_files_the_machines(
    two: Machine,
    new_machine: NewMachine,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    error: type[Exception],
) -> None:
    disk = SimpleNamespace(f_bavail=1, f_blocks=blocks, f_frsize=4096)
    with monkeypatch.context() as full:
        full.setattr(restore.os, "statvfs", lambda path: disk)
        with pytest.raises(error, match=r"needs 9\.0 MB more and 0\.0 MB are free"):
            new_machine("second")
    assert new_machine("third").step == 2


def test_fails_where_names_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Content(bytes=0, sha256=restore.hashlib.sha256().hexdigest(), part_bytes=1, blob=None)
    files = [SavedFile(path=p, mode=0o644, mtime_ns=0, content=empty) for p in ("Last", "last")]
    snapshot = FolderManifest(reason="quiet", program_says_when=False, files=tuple(files))
    store = FolderStore(tmp_path / "run")
    monkeypatch.setattr(restore, "_is_case_sensitive", lambda root: False)
    with pytest.raises(UserError, match="cannot tell 'Last' from 'last'"):
        restore.fill(store, snapshot, tmp_path / "laptop")
    monkeypatch.undo()
    restore.fill(store, snapshot, tmp_path / "linux")
    assert {path.name for path in (tmp_path / "linux").iterdir()} == {"Last", "last"}


def test_nothing_is_written_through_a_link_that_stands_in_the_way(
    two: Machine, new_machine: NewMachine, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (two.folder / "a").unlink()
    (two.folder / "a").symlink_to(outside)
    assert tree(new_machine("first").folder)["a"] != outside
    assert outside.read_bytes() == b"mine"


def test_a_file_with_holes_is_sent_as_what_it_holds_and_has_them_again(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("first")
    contents = {"data.mdb": {0: b"head", 700_000_000: os.urandom(3_000_000)}, "sparse": {}}
    machine.mirror.start()
    for name, pieces in {**contents, "twin": contents["data.mdb"]}.items():
        with (machine.folder / name).open("wb") as stream:
            for at, data in pieces.items():
                stream.seek(at)
                stream.write(data)
            stream.truncate(900_000_001)
    with (machine.folder / "twin").open("ab") as stream:
        stream.truncate(1_000_000_000)
    machine.commit()
    wait_for_snapshot(machine, 1)
    assert machine.mirror.last is not None
    assert machine.mirror.last.sent_bytes < 4_000_000
    (machine.folder / "more").write_bytes(b"x")
    machine.commit()
    wait_for_snapshot(machine, 2)
    assert machine.mirror.last.sent_bytes == 1
    machine.vanish()
    second = new_machine("second")
    for name in ("data.mdb", "sparse", "twin"):
        one, other = machine.folder / name, second.folder / name
        assert other.stat().st_size == one.stat().st_size
        assert other.stat().st_blocks * 512 < 5_000_000
        with one.open("rb") as mine, other.open("rb") as theirs:
            for at, data in {**contents["data.mdb"], 500_000_000: bytes(9)}.items():
                mine.seek(at)
                theirs.seek(at)
                assert mine.read(len(data) + 5000) == theirs.read(len(data) + 5000)


@pytest.mark.slow
def test_a_file_of_two_gigabytes_goes_there_and_back(new_machine: NewMachine) -> None:
    machine = new_machine("first")
    machine.mirror.start()
    with (machine.folder / "model.pt").open("wb") as stream:
        stream.truncate(2_000_000_001)
        for at in range(0, 2_000_000_000, 100_000_000):
            stream.seek(at)
            stream.write(secrets.token_bytes(1000))
    assert machine.end()
    second = new_machine("second")
    one, other = (m.folder / "model.pt" for m in (machine, second))
    part_bytes = 8 * 1024 * 1024
    assert restore._checksum(one, part_bytes) == restore._checksum(other, part_bytes)
    assert other.stat().st_size == 2_000_000_001


def changed(root: Path) -> dict[str, int]:
    """The time of change of every file and folder."""
    return {str(p.relative_to(root)): p.lstat().st_ctime_ns for p in root.rglob("*")}


def by(key: Callable[[Path], float], root: Path) -> list[str]:
    """The files' names, sorted as scripts do that look for the newest."""
    return [path.name for path in sorted(root.rglob("ckpt_*"), key=key)]


def write_saves(machine: Machine, number: int) -> list[str]:
    """Write saves one after another, under names in no order; return the names."""
    names = [f"run-{n % 3}/ckpt_{n * 7 % number}" for n in range(number)]
    for name in names:
        machine.write({name: name.encode()})
        time.sleep(0.02)
    return [name.partition("/")[2] for name in names]


@pytest.mark.parametrize("by_time", [os.path.getmtime, os.path.getctime])
def test_files_sorted_by_time_are_in_the_order_of_their_saves(
    new_machine: NewMachine, by_time: Callable[[Path], float]
) -> None:
    """As `max(glob, key=os.path.getctime)` looks for the newest."""
    first = new_machine("first")
    first.mirror.start()
    names = write_saves(first, 31)
    first.save({})
    first.vanish()
    second = new_machine("second")
    assert by(by_time, second.folder) == names
    assert tree(second.folder) == tree(first.folder)
    second.mirror.start()
    second.save({"another": b"file"})  # one of the newest is lost, and one that is older than all
    (second.folder / "run-0" / names[0]).unlink()
    (second.folder / "run-1" / names[-3]).write_bytes(b"after the snapshot")
    second.vanish()
    again = new_machine("second")
    assert by(by_time, again.folder) == names


def test_what_is_equal_is_not_touched(new_machine: NewMachine) -> None:
    first = new_machine("first")
    first.mirror.start()
    names = write_saves(first, 6)
    (first.folder / "latest").symlink_to(f"run-2/{names[-1]}")
    first.save({})
    first.vanish()
    before = changed(first.folder)
    assert changed(new_machine("first").folder) == before, "the same disk, another supervisor"
    (first.folder / "run-2" / names[-1]).write_bytes(b"torn")
    again = new_machine("first")
    after = changed(again.folder)
    touched = {path for path in before if before[path] != after[path]}
    assert touched <= {f"run-2/{names[-1]}", "run-2"}
    assert again.restored is not None
    assert again.restored.content.remarks == ()


def test_many_times_are_not_waited_for(store: Store, tmp_path: Path) -> None:
    empty = Content(bytes=0, sha256=restore.hashlib.sha256().hexdigest(), part_bytes=1, blob=None)
    files = [SavedFile(path=f"{n}", mode=0o644, mtime_ns=n, content=empty) for n in range(5000)]
    manifest = FolderManifest(reason="quiet", program_says_when=False, files=tuple(files))
    with patch.object(restore, "_DATING_SECONDS", 0.5):
        filled = restore.fill(store, manifest, tmp_path / "out")
    newest = sorted((tmp_path / "out").iterdir(), key=os.path.getctime)[-20:]
    assert [path.name for path in newest] == [str(n) for n in range(4980, 5000)]
    told = "".join(filled.remarks)
    assert not told or "of the oldest files have the same time of change" in told


def test_hard_links_stay_links(new_machine: NewMachine, store: Store) -> None:
    """As timm names one file last, model_best and checkpoint-N."""
    first = new_machine("first")
    first.mirror.start()
    first.write({"last": os.urandom(3_000_000), "apart": b"x" * 10, "other": b"x" * 10})
    for name in ("best", "checkpoint-9"):
        (first.folder / name).hardlink_to(first.folder / "last")
    first.save({})
    committed = first.mirror.last
    assert committed is not None
    assert committed.changed_bytes == 3_000_020, "it is read once"
    first.vanish()
    second = new_machine("second")
    assert (second.folder / "last").stat().st_nlink == 3
    assert not (second.folder / "apart").samefile(second.folder / "other")
    second.vanish()
    # On this disk the program has put a file of the same content in a link's place.
    (second.folder / "best").unlink()
    (second.folder / "best").write_bytes((second.folder / "last").read_bytes())
    (second.folder / "other").unlink()
    (second.folder / "other").hardlink_to(second.folder / "apart")
    again = new_machine("second")
    assert (again.folder / "last").stat().st_nlink == 3
    assert not (again.folder / "apart").samefile(again.folder / "other")
    assert tree(again.folder) == tree(first.folder)


def test_what_names_the_folder_of_the_machine_before_is_pointed_here_or_said(
    new_machine: NewMachine, store: Store
) -> None:
    first = new_machine("first")
    first.mirror.start()
    step = first.folder / "step-3"
    first.write({"step-3/state": b"3", "last_checkpoint": os.fsencode(step)})
    (first.folder / "latest").symlink_to(step)
    (first.folder / "elsewhere").symlink_to("/nowhere")
    first.save({})
    first.vanish()
    assert new_machine("first").restored.content.remarks == ()
    second = new_machine("second")
    assert (second.folder / "latest").resolve() == (second.folder / "step-3").resolve()
    assert (second.folder / "elsewhere").readlink() == Path("/nowhere")
    told = " ".join(each["message"] for each in Events.read(store, "restored-otherwise"))
    assert "now point into" in told
    assert f"last_checkpoint names {first.folder}" in told


def test_a_folder_that_became_a_link_is_a_folder_again(
    two: Machine, new_machine: NewMachine, tmp_path: Path
) -> None:
    second = new_machine("second")
    second.vanish()
    shutil.rmtree(second.folder)
    second.folder.symlink_to(tmp_path / "gone")
    assert tree(new_machine("second").folder) == tree(two.folder)
