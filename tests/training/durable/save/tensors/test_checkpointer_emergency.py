"""At a notice: the newest state that fits is committed, in one write that releases the lease."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.durable.attempt.machine import Clock
from tests.training.save_scene import Scene
from training.durable.store.protocol import StoreError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that counts here: it passes in slow uploads and where a test says so."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.read)
    return clock


@pytest.fixture
def scene(tmp_path: Path, clock: Clock) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    scene.store.pass_time = clock.advance
    yield scene
    scene.store.gate.set()
    scene.context.metrics.close()


def test_a_notice_finishes_a_save_of_the_same_state(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.store.gate.clear()
    scene.begin(3)
    threading.Timer(0.1, scene.store.gate.set).start()
    assert scene.emergency(3, 60)
    assert "being saved already" in capsys.readouterr().out
    assert scene.committed() == [(3, 3.0)]
    assert scene.context.lease.head.state == "released"


def test_a_notice_with_time_enough_commits_both(scene: Scene) -> None:
    scene.set_rate(1e6)
    scene.begin(2)
    assert scene.emergency(3, 60)
    assert scene.committed() == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert scene.context.lease.head.state == "released"


def test_a_notice_gives_up_the_save_under_way_for_the_newer_state(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.set_rate(10_000.0)  # nearly half a second for each: both do not fit into half of 1.8 s
    scene.store.bytes_per_second = None
    scene.store.gate.clear()
    scene.begin(2)
    threading.Timer(0.3, scene.store.gate.set).start()
    assert scene.emergency(3, 1.8)
    assert "is canceled for this one" in capsys.readouterr().out
    assert scene.committed() == [(1, 1.0), (3, 3.0)]


def test_a_notice_too_short_for_this_step_finishes_the_save_before_it(
    scene: Scene, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.set_rate(3000.0)  # one and a half seconds for each
    scene.store.bytes_per_second = None
    scene.store.gate.clear()
    scene.begin(2)
    clock.advance(1.0)
    threading.Timer(0.1, scene.store.gate.set).start()
    assert scene.emergency(3, 1.3)
    assert "finishing the previous save" in capsys.readouterr().out
    assert scene.committed() == [(1, 1.0), (2, 2.0)]
    assert scene.context.lease.head.state == "released"


def test_a_notice_too_short_leaves_the_previous_checkpoint_whole(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.set_rate(4000.0)  # a second for 4 kB
    assert not scene.emergency(2, 0.7)
    said = capsys.readouterr().out
    assert "s to upload (measured) + 0.1 s in reserve, 0.7 s left" in said
    assert "not enough time; the last commit stays" in said
    assert scene.committed() == [(1, 1.0)]


def test_a_notice_that_is_over_still_keeps_a_save_that_is_nearly_done(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(2)
    threading.Timer(0.1, scene.store.gate.set).start()
    assert not scene.emergency(3, -1.0)
    assert scene.committed() == [(2, 2.0)]


def test_an_upload_that_turns_out_slower_than_measured_is_given_up(
    scene: Scene, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.set_rate(1e6)
    scene.store.is_at_gate.clear()
    scene.store.gate.clear()

    def stall() -> None:
        assert scene.store.is_at_gate.wait(60)
        clock.advance(60)

    threading.Thread(target=stall).start()
    assert not scene.emergency(2, 30), "it did not wait for the upload"
    assert "the upload was too slow; the last commit stays" in capsys.readouterr().out
    scene.store.gate.set()
    for thread in threading.enumerate():
        if thread.name == "save":
            thread.join(60)
    assert scene.committed() == [(1, 1.0)], "nothing that comes late is published"


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
    assert scene.checkpointer.wait(120)
    scene.store.error = None
    assert scene.emergency(2, 60)
    assert scene.committed() == [(2, 2.0)]


def test_a_save_of_the_same_state_that_fails_is_tried_once_more(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.store.gate.clear()
    scene.begin(2)
    scene.store.error = StoreError("no answer")
    threading.Timer(0.1, scene.store.gate.set).start()
    assert scene.emergency(2, 60)
    assert "[save] failed: no answer" in capsys.readouterr().out
    assert scene.committed() == [(2, 2.0)]


def test_the_staged_copy_is_committed_when_no_boundary_comes(scene: Scene) -> None:
    assert scene.checkpointer.stage(scene.request(5, "emergency"))
    scene.weights.fill_(77.0)  # the main thread is in the middle of a long step
    results: list[bool] = []
    notice = scene.notice(60)
    assert scene.checkpointer.must_start_by(notice) < notice.deadline
    thread = threading.Thread(target=lambda: results.append(scene.checkpointer.save_staged(notice)))
    thread.start()
    thread.join(120)
    assert results == [True]
    assert scene.committed() == [(5, 5.0)]
    assert scene.context.lease.head.state == "released"
    assert scene.emergency(6, 60), "the boundary that comes after all changes nothing"
    assert scene.committed() == [(5, 5.0)]


def test_without_a_staged_copy_there_is_only_the_release(scene: Scene) -> None:
    assert scene.checkpointer.save_staged(scene.notice(60))
    assert scene.committed() == []


def test_a_boundary_that_is_being_saved_needs_no_staging(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(2)
    assert scene.checkpointer.stage(scene.request(2, "emergency"))
    threading.Timer(0.1, scene.store.gate.set).start()
    assert scene.checkpointer.save_staged(scene.notice(60))
    assert scene.committed() == [(2, 2.0)]


def test_a_nearer_deadline_ends_a_save_under_way(scene: Scene) -> None:
    notice = scene.notice(600)
    scene.store.gate.clear()

    def shorten() -> None:
        assert scene.store.is_at_gate.wait(60)
        notice.deadline = time.monotonic()

    threading.Thread(target=shorten).start()
    assert not scene.checkpointer.save_and_release(scene.request(1, "emergency"), notice)
    scene.store.gate.set()
    assert scene.committed() == []
