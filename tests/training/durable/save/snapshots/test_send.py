"""Only what changed is sent, in few requests; nothing that changes while it is read is kept."""

import mmap
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.durable.save.scene import NewMachine, entries, wait_for_snapshot
from training.durable.record.head import Retention
from training.durable.save.snapshots import capture as capture_module
from training.durable.save.snapshots.capture import Capture, Known, Moment, capture
from training.durable.save.snapshots.folder_saves import Blobs, FolderSave, FolderSaves, _Sent
from training.durable.save.snapshots.listing import ChangedError, FileState, Listing, SnapshotError
from training.durable.save.snapshots.mirror import Mirror
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Store, Upload
from training.durable.store.transfer import Contents


class Counting(FolderStore):
    """Counts the objects that are written."""

    num_uploads = 0

    def upload(self, key: str, *arguments: Any) -> Upload:
        self.num_uploads += 1
        return super().upload(key, *arguments)


def captured(folder: Path, known: Known, *, in_place: bool = False) -> Capture:
    return capture(
        folder,
        folder.parent / f"staging-{os.urandom(4).hex()}",
        known,
        reason="commit",
        program_says_when=True,
        note={},
        moment=Moment(),
        in_place=in_place,
    )


def send(store: Store, folder: Path, known: Known) -> _Sent:
    blobs = Blobs(store, None)  # type: ignore[arg-type]
    blobs.known = known
    publisher: Any = SimpleNamespace(store=store)
    saves = FolderSaves(publisher, folder, blobs)
    save = FolderSave(saves, captured(folder, known), "periodic", is_tentative=False)
    save.send("00000001-g0001-00", [])
    assert save.sent is not None
    return save.sent


def publish(mirror: Mirror, capture: Capture) -> None:
    save = FolderSave(mirror._saves, capture, "periodic", is_tentative=False)
    save.run()
    if save.error is not None:
        raise save.error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def test_small_files_go_in_packs_and_only_those_that_changed(tmp_path: Path, folder: Path) -> None:
    store = Counting(tmp_path / "run")
    for number in range(500):
        (folder / f"{number}").write_bytes(os.urandom(100))
    first = send(store, folder, Known())
    assert (store.num_uploads, first.sent_bytes) == (1, 50_000)
    (folder / "7").write_bytes(os.urandom(100))
    second = send(store, folder, Known.after(first.manifest, first.files))
    assert (store.num_uploads, second.sent_bytes) == (2, 100)


def test_a_copy_or_a_new_name_is_not_sent_again(tmp_path: Path, folder: Path) -> None:
    store = Counting(tmp_path / "run")
    (folder / "epoch-1.ckpt").write_bytes(os.urandom(3_000_000))
    first = send(store, folder, Known())
    (folder / "last.ckpt").write_bytes((folder / "epoch-1.ckpt").read_bytes())
    (folder / "epoch-1.ckpt").rename(folder / "best.ckpt")
    second = send(store, folder, Known.after(first.manifest, first.files))
    assert (second.changed_bytes, second.sent_bytes) == (6_000_000, 0)


def test_what_was_moved_away_and_back_is_not_named_once_it_is_deleted(
    new_machine: NewMachine, store: Store, folder: Path, tmp_path: Path
) -> None:
    machine = new_machine("first", retention=Retention(newest=1))
    mirror = machine.mirror
    (folder / "best").mkdir()
    (folder / "best" / "model.pt").write_bytes(os.urandom(2_000_000))
    (folder / "last.pt").write_bytes(os.urandom(2_000_000))
    publish(mirror, captured(folder, mirror._blobs.known))
    (folder / "best").rename(tmp_path / "away")
    without = captured(folder, mirror._blobs.known)
    (tmp_path / "away").rename(folder / "best")
    again = captured(folder, mirror._blobs.known)  # while the one before it is being sent
    publish(mirror, without)
    with pytest.raises(ChangedError, match="deleted after its capture"):
        publish(mirror, again)
    publish(mirror, captured(folder, mirror._blobs.known))
    second = new_machine("second")
    assert second.restored is not None
    assert (second.folder / "best" / "model.pt").stat().st_size == 2_000_000


def test_a_file_that_has_two_names_and_is_mapped_is_read_again_under_both(folder: Path) -> None:
    (folder / "state").write_bytes(bytes(4096))
    (folder / "same").hardlink_to(folder / "state")
    with (folder / "state").open("r+b") as stream, mmap.mmap(stream.fileno(), 4096):
        assert captured(folder, Known()).mapped == {"state", "same"}


def test_whole_seconds_as_times_are_waited_for() -> None:
    def settles_in(ctime_ns: int) -> float:
        file = FileState(device=1, inode=1, bytes=1, mtime_ns=0, ctime_ns=ctime_ns, mode=0o644)
        now = 1_700_000_000_500_000_000
        listing = Listing(files={"a": file}, links={}, folders={}, skipped={}, began_ns=now)
        return listing.settles_in_ns / 1e9

    assert settles_in(1_700_000_000_000_000_000) == pytest.approx(1.5)
    assert settles_in(1_700_000_000_499_000_001) == pytest.approx(0.019)
    assert settles_in(1_700_000_000_000_000_001) == 0
    assert settles_in(1_699_999_998_000_000_000) == 0


def test_a_time_that_is_still_to_come_says_nothing_about_a_request() -> None:
    now = time.time_ns()
    times = {"old": now - 9, "new": now - 1, "before the clock was set back": now + 10**12}
    files = {
        path: FileState(device=1, inode=1, bytes=1, mtime_ns=0, ctime_ns=at, mode=0o644)
        for path, at in times.items()
    }
    listing = Listing(files=files, links={}, folders={}, skipped={}, began_ns=now)
    assert listing.changed_after(now - 5) == "new"
    assert listing.changed_after(now - 1) is None


def test_at_most_half_of_what_is_stored_is_waste(tmp_path: Path, folder: Path) -> None:
    store = Counting(tmp_path / "run")
    for number in range(10):
        (folder / f"{number}").write_bytes(os.urandom(1000))
    sent = send(store, folder, Known())
    (old,) = sent.manifest.blobs
    for number in range(6):
        (folder / f"{number}").unlink()
    sent = send(store, folder, Known.after(sent.manifest, sent.files))
    assert sent.manifest.blobs.keys() == {old}, "this one needs less than half of it"
    sent = send(store, folder, Known.after(sent.manifest, sent.files))
    assert old not in sent.manifest.blobs
    assert sum(sent.manifest.blobs.values()) == 4000


def test_a_file_that_changes_while_it_is_copied_voids_the_capture(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.pt").write_bytes(b"one")
    copy = capture_module._copy

    def slowly(source: Path, target: Path, ends: float) -> None:
        copy(source, target, ends)
        source.write_bytes(b"two")

    monkeypatch.setattr(capture_module, "_copy", slowly)
    with pytest.raises(ChangedError, match=r"'model\.pt' changed while it was captured"):
        captured(folder, Known())
    assert list(folder.parent.glob("staging-*")) == []


def test_where_there_is_no_room_for_a_copy_it_is_sent_from_where_it_lies(
    new_machine: NewMachine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "_has_room", lambda folder, need: False)
    machine = new_machine("first")
    machine.mirror.start()
    machine.write({"model.pt": b"x" * 2_000_000})
    machine.commit()
    assert len(entries(store)) == 1, "the program waited until it was committed"
    assert not list(machine.work.glob("staging-*"))


def test_a_change_while_it_is_sent_from_where_it_lies_voids_the_snapshot(
    new_machine: NewMachine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "_has_room", lambda folder, need: False)
    machine = new_machine("first", quiet_seconds=0.1)
    machine.write({"model.pt": b"one"})
    read, changes = capture_module.Pack.read, []

    def disturbed(self: Contents, *arguments: Any) -> memoryview:
        data = read(self, *arguments)
        if not changes:
            changes.append(machine.write({"model.pt": b"two"}))
        return data

    monkeypatch.setattr(capture_module.Pack, "read", disturbed)
    machine.mirror.start()
    wait_for_snapshot(machine, 1)
    assert machine.end()
    assert (new_machine("second").folder / "model.pt").read_bytes() == b"two"
    assert len(store.sizes("blobs/")) == 1, "what was sent for the void one is gone"


def test_fails_for_a_file_that_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "secret").write_bytes(b"x")

    def refuse(source: Path, target: Path, ends: float) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr(capture_module, "_copy", refuse)
    with pytest.raises(SnapshotError, match="secret: Permission denied; a snapshot without it"):
        captured(folder, Known())
