"""The newest snapshot that holds comes back; whatever is damaged is passed over by name."""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.errors import UserError
from tests.training.durable.save.scene import Machine, entries, tree, wait_for_snapshot, wait_until
from training.durable.errors import MachineError
from training.durable.save.snapshots import snapshot as restore
from training.durable.save.snapshots.snapshot import Content, FolderManifest, SavedFile
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Store, StoreError

NewMachine = Callable[..., Machine]


@pytest.fixture
def two(new_machine: NewMachine) -> Machine:
    """A run with two snapshots, each with a file in parts and a pack of its own."""
    machine = new_machine("first")
    machine.mirror.start()
    for number in (1, 2):
        machine.write({"large": os.urandom(9_000_000), "a": b"%d" % number, "b": os.urandom(500)})
        machine.commit()
        wait_for_snapshot(machine, number)
    machine.vanish()
    return machine


def blobs_of(store: Store, number: int) -> list[Path]:
    """The files of a snapshot's blobs that the other one does not use."""
    found = [restore.read_manifest(store, entry).blobs for entry in entries(store)]
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
    assert machine.restored is not None
    assert machine.restored.entry.step == 1
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
    third = new_machine("third")
    assert third.restored is not None
    assert third.restored.entry.step == 2


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
        third.write({"a": b"new %d" % number})
        third.commit()
        wait_for_snapshot(third, 2 + number)
        third.lease.sweep()
        third.mirror._blobs.sweep()
        assert kept.items() <= store.sizes("").items()
        assert [one.name for one in entries(store) if one.is_left_behind] == names
    third.write({"a": b"new 4"})
    third.commit()
    wait_for_snapshot(third, 6)
    third.vanish()
    assert [one.step for one in entries(store)] == [4, 5, 6]
    fourth = new_machine("fourth")
    assert not kept.keys() & store.sizes("").keys()
    assert fourth.restored is not None
    assert fourth.restored.entry.step == 6
    reasons = [json.loads(found.data) for found in map(store.get, store.sizes("events/")) if found]
    told = [event for event in reasons if event["name"] == "none-valid"]
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
        assert well.restored is not None
        assert well.restored.entry.step == 2
        well.vanish()


@pytest.fixture
def sharing(new_machine: NewMachine) -> Machine:
    """A run whose three snapshots share a file in parts and a pack."""
    machine = new_machine("first")
    machine.mirror.start()
    for number in (1, 2, 3):
        shared = {} if number > 1 else {"base": os.urandom(9_000_000), "vocabulary": b"words"}
        machine.write({**shared, "a": b"%d" % number})
        machine.commit()
        wait_for_snapshot(machine, number)
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
    snapshots = [restore.read_manifest(store, entry) for entry in entries(store)]
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
    assert second.restored is not None
    assert second.restored.entry.step == 3
    assert tree(second.folder) == tree(sharing.folder)
    second.mirror.start()
    second.write({"a": b"4"})
    second.commit()
    wait_for_snapshot(second, 4)
    newest = restore.read_manifest(store, entries(store)[-1])
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
        second.write({"a": b"%d" % number})
        second.commit()
        wait_for_snapshot(second, number)
    assert written() == before
    (second.folder / "base").unlink()
    (second.folder / "vocabulary").unlink()
    for number in range(8, 12):
        second.write({"a": b"%d" % number})
        second.commit()
        wait_for_snapshot(second, number)
    wait_until(lambda: not written(), second.mirror)


def test_a_damaged_blob_is_found_before_all_snapshots_need_it_and_is_sent_again(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("first")
    machine.mirror.start()
    machine.write({"base": os.urandom(9_000_000), "a": b"1"})
    machine.commit()
    wait_for_snapshot(machine, 1)
    for path in Path(store.uri, "blobs").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    for number in (2, 3, 4):
        machine.write({"a": b"%d" % number})
        machine.commit()
        wait_for_snapshot(machine, number)
        if number > 2:
            wait_until(lambda: machine.mirror._blobs._damaged, machine.mirror)
    machine.vanish()
    second = new_machine("second")
    assert second.restored is not None
    assert second.restored.entry.step == 4
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
    third = new_machine("third")
    assert third.restored is not None
    assert third.restored.entry.step == 2


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


def test_fails_with_sizes_where_the_disk_is_too_small(
    two: Machine, new_machine: NewMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small:
        f_bavail, f_blocks, f_frsize = 1, 2, 4096

    monkeypatch.setattr(restore.os, "statvfs", lambda path: Small)
    with pytest.raises(UserError, match=r"needs 9\.0 MB more and 0\.0 MB are free"):
        new_machine("second")


def test_a_disk_that_is_full_of_other_files_is_the_machines_fault(
    two: Machine, new_machine: NewMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_blocks, f_frsize = 1, 2**20, 4096

    with monkeypatch.context() as full:
        full.setattr(restore.os, "statvfs", lambda path: Full)
        with pytest.raises(MachineError, match=r"needs 9\.0 MB more and 0\.0 MB are free"):
            new_machine("second")
    third = new_machine("third")
    assert third.restored is not None
    assert third.restored.entry.step == 2


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
