"""Saves run behind the training, one at a time, and are published whole or not at all."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training.capture import Capture
from training.checkpoint import read_checkpoint
from training.config import parse_interval
from training.distributed import Place, World
from training.errors import RunFailedError
from training.events import Events
from training.head import Lease, LeaseLostError, acquire, read_head
from training.interruption import Interruption, Notice
from training.metrics import Metrics
from training.position import Attempt, Position
from training.saver import Saver
from training.store import FolderStore, StoreError, Upload

CPU = torch.device("cpu")


class GatedStore(FolderStore):
    """A folder whose uploads can be held up, slowed down or broken."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.bytes_per_second: float | None = None
        self.error: Exception | None = None
        self.num_begun = 0

    def upload(self, key: str, *arguments: Any) -> Upload:
        self.num_begun += 1
        upload = super().upload(key, *arguments)
        put = upload.put

        def gated_put(number: int, start: int, data: memoryview, sha256: bytes) -> None:
            assert self.gate.wait(20)
            if self.error:
                raise self.error
            if self.bytes_per_second:
                with self._line:
                    time.sleep(len(data) / self.bytes_per_second)
            put(number, start, data, sha256)

        upload.put = gated_put  # type: ignore[method-assign]
        return upload

    _line = threading.Lock()


class Scene:
    """A saver with everything that it writes to, and a state of one tensor."""

    def __init__(self, root: Path, interval: str = "1steps") -> None:
        self.store = GatedStore(root / "run")
        lease = acquire(self.store, "run-1", "i-1", 60, lambda s: False, lambda holder: None)
        assert isinstance(lease, Lease)
        self.attempt = Attempt(
            store=self.store,
            held=lease,
            metrics=Metrics(self.store, 1, "nonce", root / "metrics.jsonl"),
            events=Events(self.store, "i-1"),
            interruption=Interruption(budget_seconds=120),
            interval=parse_interval(interval),
            scratch=root,
            world=World(Place(), CPU),
        )
        self.saver = Saver(self.attempt, None)
        self.weights = torch.zeros(1000)

    def position(self, step: int, **fields: Any) -> Position:
        return Position(stage="a", stage_step=step, step=step, **fields)

    def capture(self, step: int) -> Capture:
        self.weights.fill_(step)
        tensors: dict[str, dict[str, Tensor]] = {"model": {"w": self.weights}, "optimizer": {}}
        return Capture(tensors=tensors, state={"step": step})

    def begin(self, step: int, **fields: Any) -> None:
        self.saver.begin(self.capture(step), self.position(step, **fields), 0)

    def notice(self, seconds: float) -> Notice:
        now = time.monotonic()
        return Notice(cause="notice", received=now, deadline=now + seconds)

    def emergency(self, step: int, seconds: float) -> bool:
        notice = self.notice(seconds)
        return self.saver.emergency(self.capture(step), self.position(step), 0, notice)

    def finish(self) -> None:
        deadline = time.monotonic() + 20
        while self.saver.is_saving:
            assert time.monotonic() < deadline
            self.saver.poll()
            time.sleep(0.001)

    def committed(self) -> list[tuple[int, float]]:
        """Step and weight of every checkpoint that the head names."""
        head = read_head(self.store)
        assert head is not None
        found = []
        for entry in head.checkpoints:
            snapshot = read_checkpoint(self.store, entry)
            weights = snapshot.tensors["model"]["w"]
            assert bool((weights == weights[0]).all())
            found.append((entry.step, float(weights[0])))
        return found

    def set_rate(self, bytes_per_second: float) -> None:
        """Let a first save measure the rate that later ones reckon with."""
        self.store.bytes_per_second = bytes_per_second
        self.saver.commit(self.capture(1), self.position(1), 0, "periodic")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.store.gate.set()
    scene.attempt.metrics.close()


def test_training_goes_on_while_a_save_is_under_way(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    scene.weights.fill_(77.0)
    scene.saver.poll()
    assert scene.committed() == []
    scene.store.gate.set()
    scene.finish()
    assert scene.committed() == [(1, 1.0)], "the state of the boundary, not of later"


def test_a_save_that_is_due_waits_for_the_one_under_way(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    threading.Timer(0.2, scene.store.gate.set).start()
    began = time.monotonic()
    scene.begin(2)
    assert time.monotonic() - began >= 0.15
    scene.finish()
    assert scene.committed() == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("interval", ["1s", "auto"])
def test_an_interval_of_time_is_put_off_while_a_save_is_under_way(
    tmp_path: Path, interval: str
) -> None:
    scene = Scene(tmp_path, interval)
    scene.store.gate.clear()
    scene.begin(1)
    scene.saver._last_boundary -= 100_000
    assert not scene.saver.is_due(scene.position(2), 10)
    scene.store.gate.set()
    scene.finish()
    assert scene.saver.is_due(scene.position(2), 10)
    scene.attempt.metrics.close()


def test_what_goes_wrong_behind_the_training_is_raised_at_the_next_poll(scene: Scene) -> None:
    scene.store.error = StoreError("the disk is full")
    scene.begin(1)
    assert scene.saver.wait(20)
    with pytest.raises(StoreError, match="the disk is full"):
        scene.saver.poll()
    assert scene.committed() == []
    scene.store.error = None
    scene.begin(2)
    scene.finish()
    assert scene.committed() == [(2, 2.0)]


def test_what_goes_wrong_is_raised_at_the_latest_by_the_next_save(scene: Scene) -> None:
    scene.store.error = StoreError("the disk is full")
    scene.begin(1)
    with pytest.raises(StoreError, match="the disk is full"):
        scene.saver.commit(scene.capture(2), scene.position(2), 0, "stage-end")


def test_nothing_is_published_once_the_lease_is_lost(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    other = acquire(scene.store, "run-1", "i-2", 0.0, lambda s: False, lambda holder: None)
    assert isinstance(other, Lease)
    scene.store.gate.set()
    assert scene.saver.wait(20)
    with pytest.raises(LeaseLostError):
        scene.saver.poll()
    head = read_head(scene.store)
    assert head == other.head
    assert head.checkpoints == ()
    with pytest.raises(LeaseLostError):
        scene.emergency(2, 60)
    assert read_head(scene.store) == other.head


def test_nothing_with_a_nan_is_published(scene: Scene) -> None:
    scene.saver.begin(scene.capture(1), scene.position(1), 0)
    scene.finish()
    capture = scene.capture(2)
    scene.weights[5] = float("nan")
    scene.saver.begin(capture, scene.position(2), 0)
    assert scene.saver.wait(20)
    with pytest.raises(RunFailedError, match="step 2: w holds a NaN; nothing was published"):
        scene.saver.poll()
    with pytest.raises(RunFailedError, match="w holds a NaN"):
        scene.saver.commit(capture, scene.position(2), 0, "stage-end")
    assert scene.committed() == [(1, 1.0)]


def test_the_memory_of_the_copy_is_used_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.begin(1)
    scene.finish()
    monkeypatch.setattr("training.saver.available_bytes", lambda: 0)
    scene.begin(2)
    assert scene.saver.is_saving, "no memory is needed for another copy"
    scene.finish()
    assert scene.committed() == [(1, 1.0), (2, 2.0)]


def test_a_state_that_memory_cannot_hold_twice_is_streamed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.saver.available_bytes", lambda: 600 * 1024 * 1024)
    monkeypatch.setattr("training.saver._SPARE_BYTES", 600 * 1024 * 1024 - 3999)
    scene.begin(1)
    assert not scene.saver.is_saving
    assert "memory cannot hold a copy of the state; streaming it" in capsys.readouterr().out
    assert scene.committed() == [(1, 1.0)]
    assert not scene.saver.stage(scene.capture(2), scene.position(2), 0)
    monkeypatch.setattr("training.saver._SPARE_BYTES", 600 * 1024 * 1024 - 4000)
    scene.begin(2)
    assert scene.saver.is_saving


def test_a_new_best_is_due_at_once_and_marked(scene: Scene) -> None:
    best = {"step": 4, "value": 0.5}
    position = scene.position(4, evaluated_step=4, best=best)
    saver = scene.saver
    assert saver.is_due(position, 100)
    saver.begin(scene.capture(4), position, 0)
    scene.finish()
    assert not saver.is_due(position, 100)
    (entry,) = scene.attempt.lease.head.checkpoints
    assert (entry.kind, entry.is_best) == ("best", True)


@pytest.mark.parametrize(
    ("interval", "due"),
    [("3steps", [3, 6, 9]), ("2epochs", [8]), ("1epoch", [4, 8])],
)
def test_steps_and_epochs_are_kept_to_the_step(
    tmp_path: Path, interval: str, due: list[int]
) -> None:
    scene = Scene(tmp_path, interval)
    assert [s for s in range(1, 11) if scene.saver.is_due(scene.position(s), 4)] == due
    scene.attempt.metrics.close()


def test_auto_says_what_it_chose_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(tmp_path, "auto")
    scene.begin(1)
    scene.finish()
    said = capsys.readouterr().out
    assert "[interval] auto: every 60.0 s: more often gains next to nothing" in said
    assert "2.1 h between interruptions" in said
    assert '"kind":"interval"' in (tmp_path / "metrics.jsonl").read_text()
    scene.attempt.metrics.close()


def test_a_notice_finishes_a_save_of_the_same_state(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.store.gate.clear()
    scene.begin(3)
    threading.Timer(0.1, scene.store.gate.set).start()
    assert scene.emergency(3, 60)
    assert "being saved already" in capsys.readouterr().out
    assert scene.committed() == [(3, 3.0)]
    assert scene.attempt.lease.head.state == "released"


def test_a_notice_with_time_enough_commits_both(scene: Scene) -> None:
    scene.set_rate(1e6)
    scene.begin(2)
    assert scene.emergency(3, 60)
    assert scene.committed() == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert scene.attempt.lease.head.state == "released"


def test_a_notice_gives_up_the_save_under_way_for_the_newer_state(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.set_rate(10_000.0)  # nearly half a second for each: both do not fit into half of 1.8 s
    scene.store.bytes_per_second = None
    scene.store.gate.clear()
    scene.begin(2)
    threading.Timer(0.3, scene.store.gate.set).start()
    assert scene.emergency(3, 1.8)
    assert "is given up for this one" in capsys.readouterr().out
    assert scene.committed() == [(1, 1.0), (3, 3.0)]


def test_a_notice_too_short_for_this_step_finishes_the_save_before_it(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.set_rate(3000.0)  # one and a half seconds for each
    scene.store.bytes_per_second = None
    scene.store.gate.clear()
    scene.begin(2)
    time.sleep(1.0)
    threading.Timer(0.1, scene.store.gate.set).start()
    assert scene.emergency(3, 1.3)
    assert "finishing the save before it" in capsys.readouterr().out
    assert scene.committed() == [(1, 1.0), (2, 2.0)]
    assert scene.attempt.lease.head.state == "released"


def test_a_notice_too_short_leaves_the_previous_checkpoint_whole(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.set_rate(4000.0)  # a second for 4 kB
    assert not scene.emergency(2, 0.5)
    said = capsys.readouterr().out
    assert "s to upload (measured) + 0.1 s in reserve, 0.5 s left" in said
    assert "not enough time; the last commit stays" in said
    assert scene.committed() == [(1, 1.0)]


def test_an_upload_that_turns_out_slower_than_measured_is_given_up(scene: Scene) -> None:
    scene.set_rate(1e6)
    scene.store.bytes_per_second = 1000.0
    began = time.monotonic()
    assert not scene.emergency(2, 1.0)
    assert time.monotonic() - began < 3
    assert scene.committed() == [(1, 1.0)]
    time.sleep(0.1)
    assert scene.committed() == [(1, 1.0)], "nothing that comes late is published"


def test_an_emergency_under_a_bandwidth_cap_commits_in_time(scene: Scene) -> None:
    scene.weights = torch.zeros(1_000_000)
    scene.set_rate(8e6)
    began = time.monotonic()
    assert scene.emergency(2, 20)
    assert 0.4 < time.monotonic() - began < 10
    assert scene.committed() == [(1, 1.0), (2, 2.0)]


def test_a_notice_right_after_a_commit_only_releases(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.begin(2)
    scene.finish()
    begun = scene.store.num_begun
    assert scene.emergency(2, 60)
    assert "nothing changed since the last commit; only releasing" in capsys.readouterr().out
    assert scene.store.num_begun == begun


def test_a_failed_save_under_way_does_not_keep_an_emergency_from_saving(scene: Scene) -> None:
    scene.store.error = StoreError("no answer")
    scene.begin(2)
    assert scene.saver.wait(20)
    scene.store.error = None
    assert scene.emergency(2, 60)
    assert scene.committed() == [(2, 2.0)]


def test_the_staged_copy_is_committed_when_no_boundary_comes(scene: Scene) -> None:
    assert scene.saver.stage(scene.capture(5), scene.position(5), 0)
    scene.weights.fill_(77.0)  # the main thread is in the middle of a long step
    results: list[bool] = []
    notice = scene.notice(60)
    assert scene.saver.must_begin_by(notice) < notice.deadline
    thread = threading.Thread(target=lambda: results.append(scene.saver.emergency_staged(notice)))
    thread.start()
    thread.join(20)
    assert results == [True]
    assert scene.committed() == [(5, 5.0)]
    assert scene.attempt.lease.head.state == "released"
    assert scene.emergency(6, 60), "the boundary that comes after all changes nothing"
    assert scene.committed() == [(5, 5.0)]


def test_without_a_staged_copy_there_is_only_the_release(scene: Scene) -> None:
    assert scene.saver.emergency_staged(scene.notice(60))
    assert scene.committed() == []


def test_a_boundary_that_is_being_saved_needs_no_staging(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(2)
    assert scene.saver.stage(scene.capture(2), scene.position(2), 0)
    threading.Timer(0.1, scene.store.gate.set).start()
    assert scene.saver.emergency_staged(scene.notice(60))
    assert scene.committed() == [(2, 2.0)]


def test_an_attempt_that_ends_finishes_the_save_under_way(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    threading.Timer(0.1, scene.store.gate.set).start()
    scene.saver.close()
    assert scene.committed() == [(1, 1.0)]


def test_an_attempt_that_lost_its_lease_ends_without_waiting(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    scene.attempt.lease.lost.set()
    began = time.monotonic()
    scene.saver.close()
    assert time.monotonic() - began < 1


def test_how_long_a_run_trained_goes_with_the_checkpoint(scene: Scene) -> None:
    saver = Saver(scene.attempt, None, spent_seconds=1000.0)
    saver.commit(scene.capture(1), scene.position(1), 0, "periodic")
    snapshot = read_checkpoint(scene.store, scene.attempt.lease.head.checkpoints[-1])
    assert 1000.0 <= snapshot.state["spent_seconds"] < 1100.0
    assert snapshot.state["step"] == 1


def test_parts_are_read_back_by_several_threads_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.transfer.PART_BYTES", 1000)
    scene.weights = torch.zeros(10_001)
    scene.begin(1)
    scene.finish()
    entry = scene.attempt.lease.head.checkpoints[-1]
    model = next(file for file in entry.files if file.name == "model.safetensors")
    assert model.part_bytes == 1000
    assert model.bytes > 40_000
    assert scene.committed() == [(1, 1.0)]
