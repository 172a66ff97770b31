"""Two mirrors of one run: whatever a stale one does when it wakes, and whatever the store refuses.

A random series of what machines do, through stores that lose and delay writes; after each, all that
the head names can be restored.
"""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.durable.save.scene import NewMachine, entries, take_lease, wait_until
from training.durable.record.head import Retention
from training.durable.record.lease import LeaseLostError
from training.durable.record.metrics import Events, SilentMetrics
from training.durable.save.publish import CheckpointPublisher
from training.durable.save.snapshots.capture import Moment, capture
from training.durable.save.snapshots.folder_saves import FolderSave
from training.durable.save.snapshots.mirror import Mirror
from training.durable.save.snapshots.restore import fill
from training.durable.save.snapshots.snapshot import read_manifest
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Store, StoreError
from training.proof.injector import Injector, StatusFile, misbehaving


def restore_all(store: Store, into: Path) -> list[bytes]:
    """Restore everything that the head names; the newest file of each."""
    found = []
    for entry in entries(store):
        folder = into / entry.name
        fill(store, read_manifest(store, entry), folder)
        found.append((folder / "model.pt").read_bytes())
    return found


@pytest.mark.parametrize("key", ["blobs/", "checkpoints/", "head.json"])
def test_a_mirror_that_is_suspended_in_a_commit_commits_nothing_when_it_wakes(
    new_machine: NewMachine, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    zombie = new_machine("zombie")
    zombie.mirror.start()
    zombie.save({"model.pt": b"one", "same.pt": bytes(5000)})
    reached, wakes = threading.Event(), threading.Event()

    def suspended(name: str) -> Callable[..., object]:
        act = getattr(FolderStore, name)

        def wait(self: FolderStore, at: str, *arguments: object) -> object:
            if at.startswith(key) and threading.current_thread().name in ("save", "transfer"):
                reached.set()
                assert wakes.wait(60)
            return act(self, at, *arguments)

        return wait

    with monkeypatch.context() as patched:
        for name in ("upload", "put", "put_if"):
            patched.setattr(FolderStore, name, suspended(name))
        zombie.write({"model.pt": b"zombie"})
        zombie.commit()
        assert reached.wait(60)
    successor = new_machine("successor", retention=Retention(newest=1))
    assert (successor.folder / "model.pt").read_bytes() == b"one"
    successor.mirror.start()
    successor.save({"model.pt": b"two"})
    wakes.set()
    with pytest.raises(LeaseLostError):
        wait_until(lambda: zombie.lease.lost.is_set() and zombie.mirror.check(), zombie.mirror)
    with pytest.raises(LeaseLostError):
        zombie.end()
    assert restore_all(store, tmp_path / "all") == [b"two"]
    assert successor.end()
    assert restore_all(store, tmp_path / "again") == [b"two"]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_head_names_can_be_restored(tmp_path: Path, seed: int) -> None:
    """Publishers that take turns, wake as zombies, and meet faults; each waits for no clock."""
    rng = random.Random(seed)
    store = FolderStore(tmp_path / "run")
    mirrors: list[tuple[Mirror, Path]] = []
    written: set[bytes] = set()
    for number in range(30):
        if not mirrors or rng.random() < 0.2:
            mirrors.append(taken_over(store, tmp_path / f"disk-{number}", rng.randrange(1000)))
        mirror, folder = rng.choice(mirrors[-3:])
        data = rng.randbytes(rng.choice([10, 1000, 1_100_000]))
        written.add(data)
        (folder / "model.pt").write_bytes(data)
        (folder / f"other-{rng.randrange(4)}.pt").write_bytes(rng.randbytes(2000))
        captured = capture(
            folder,
            tmp_path / f"staging-{number}",
            mirror._blobs.known,
            reason="commit",
            program_says_when=True,
            note={},
            moment=Moment(),
        )
        save = FolderSave(mirror._saves, captured, "periodic", is_tentative=False)
        save.hurry()
        save.run()
        assert save.error is None or isinstance(save.error, StoreError | LeaseLostError)
        time.sleep(0.01)
        if (store.get("head.json") is not None) and entries(store):
            assert set(restore_all(store, tmp_path / f"all-{number}")) <= written
    assert entries(store), "nothing was ever committed"


def taken_over(store: FolderStore, disk: Path, seed: int) -> tuple[Mirror, Path]:
    """A new holder of the lease, behind a store that misbehaves from then on."""
    lease = take_lease(store, disk.name)
    folder = disk / "checkpoints"
    folder.mkdir(parents=True)
    injector = Injector([StatusFile(disk / "status")], 0)
    faulty = misbehaving(store, injector, 0.15, seed)
    events, retention = Events(store, disk.name), Retention(newest=2)
    publisher = CheckpointPublisher(
        faulty, lease, events=events, metrics=SilentMetrics(), retention=retention
    )
    mirror = Mirror(publisher, folder=folder, work=disk / "work")
    if named := lease.head.checkpoints:
        filled = fill(store, read_manifest(store, named[-1]), folder)
        mirror._blobs.begin_with(filled.manifest, filled.files)
    mirror._blobs.sweep()
    lease._store = faulty
    return mirror, folder
