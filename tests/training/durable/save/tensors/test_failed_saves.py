"""A run whose store fails: it trains on and loses nothing, or ends when that lasts."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import Run, assert_equal
from training.durable.save.publish import FailedSaves
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import StoreError, Upload


def break_uploads(monkeypatch: pytest.MonkeyPatch, name: str, numbers: range) -> None:
    """Let the store refuse these uploads of checkpoint files of a name, counted from 0."""
    upload, begun = FolderStore.upload, iter(range(10**6))

    def broken(self: FolderStore, key: str, *arguments: Any) -> Upload:
        if key.endswith(name) and next(begun) in numbers:
            raise StoreError(f"{key}: 503 Slow Down")
        return upload(self, key, *arguments)

    monkeypatch.setattr(FolderStore, "upload", broken)


def test_a_store_that_fails_one_save_costs_that_save_alone(
    run: Run, whole: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_uploads(monkeypatch, "model.safetensors", range(1, 2))
    assert run.attempt() == 0
    assert "[save] step 6 was not saved, 1 in a row:" in capsys.readouterr().out
    (event,) = run.events("save-failed")
    assert (event["status"], event["step"], event["kind"]) == ("failed", 6, "periodic")
    assert "503 Slow Down" in event["message"]
    assert 6 not in [event["step"] for event in run.events("committed")]
    assert_equal(run, whole)
    assert run.json("receipt.json")["generations"] == 1
    stored = {key.split("/")[1] for key in run.store.sizes("checkpoints/")}
    assert stored == {entry.name for entry in run.head.checkpoints}, "nothing is left of it"


def test_metrics_that_the_store_refuses_arrive_later(
    run: Run, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, refusals = FolderStore.put, [1, 1, 1]

    def broken(self: FolderStore, key: str, data: bytes) -> None:
        if key.startswith("metrics/") and refusals:
            refusals.pop()
            raise StoreError(f"{key}: 503 Slow Down")
        put(self, key, data)

    monkeypatch.setattr(FolderStore, "put", broken)
    assert run.attempt() == 0
    assert refusals == []
    assert_equal(run, whole)
    assert len(run.lines("step")) == len(whole.lines("step"))


def test_fails_when_the_store_never_works(
    run: Run, whole: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.durable.save.publish._MAX_FAILED_SECONDS", 0.0)
    monkeypatch.setattr("training.durable.save.publish._MAX_FAILED_SAVES", 3)
    with monkeypatch.context() as broken:
        break_uploads(broken, "model.safetensors", range(10**6))
        assert run.attempt("--checkpoint-interval=2steps") == 74
    assert "503 Slow Down" in capsys.readouterr().err
    assert (run.head.state, run.head.checkpoints) == ("released", ())
    assert [event["step"] for event in run.events("save-failed")][:2] == [2, 4]
    assert run.attempt() == 0
    assert_equal(run, whole)


def kill_while_writing(place: str) -> None:
    """Let this process be killed when it has written a file below `place`, before it counts."""
    fsync = os.fsync

    def killing(file: int) -> None:
        if f"/{place}" in str(Path(f"/proc/self/fd/{file}").readlink()):
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)

    os.fsync = killing  # in a forked process


def test_killed_saves_leave_nothing_behind(run: Run, whole: Run) -> None:
    root = Path(run.uri)
    run.options = [f"--artifacts-uri={root.parent / 'shared'}"]
    before: set[Path] = set()
    places = ["artifacts/", "shared/", "checkpoints/", "checkpoints/", "metrics/", "final/"]
    for place in places:
        run.at_start = partial(kill_while_writing, place)
        assert run.attempt_in_fork() == -signal.SIGKILL
        left = set(root.parent.rglob(".*.part"))
        assert left, "it was killed in mid-save"
        assert not left & before, "what the attempt before has left is gone"
        before = left
    run.at_start = None
    assert run.attempt() == 0
    assert list(root.parent.rglob("*.part")) == []
    checkpoints = [path for path in (root / "checkpoints").rglob("*") if path.is_file()]
    named = [file.bytes for entry in run.head.checkpoints for file in entry.files]
    assert sum(path.stat().st_size for path in checkpoints) == sum(named)
    assert_equal(run, whole)


def test_both_many_and_long_make_failed_saves_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("training.durable.save.publish.time.monotonic", lambda: now)
    failed, due = FailedSaves(), []
    for _ in range(5):
        failed.add(now)
        due.append(failed._retry_at - now)
    assert due == [5.0, 10.0, 20.0, 40.0, 80.0]
    assert not failed.is_hopeless, "so many, but within a moment"
    now += 600.0
    assert failed.is_hopeless
    failed.clear()
    failed.add(now)
    assert not failed.is_hopeless, "a commit ends the row"
