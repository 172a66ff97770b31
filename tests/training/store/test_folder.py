"""A store in a folder: what is written is whole, and no stopped process holds it up for ever."""

import fcntl
from pathlib import Path

import pytest

from training.store.folder import FolderStore
from training.store.protocol import StoreError


def test_a_folder_write_that_breaks_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    store.put("a", b"old")

    def broken(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(StoreError, match="a: disk full"):
        store.put("a", b"new")
    monkeypatch.undo()
    assert store.get("a") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_fails_when_a_stopped_process_holds_the_folder_s_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.store.folder._LOCK_SECONDS", 0.1)
    with (tmp_path / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=r"\.lock was locked by another process"):
            FolderStore(tmp_path).put_if("head.json", b"x", None)
    FolderStore(tmp_path).put_if("head.json", b"x", None)
