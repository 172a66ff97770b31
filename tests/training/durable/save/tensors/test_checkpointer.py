"""Saves run behind the training, one at a time, and are published whole or not at all."""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.save_scene import Scene
from training.durable.errors import RunFailedError
from training.durable.record.head import Head
from training.durable.record.lease import Lease, LeaseLostError, acquire
from training.durable.save.publish import Cost
from training.durable.save.tensors.checkpointer import Checkpointer, TensorSave
from training.durable.save.tensors.policy import CheckpointPolicy
from training.durable.save.tensors.resume import CheckpointContent
from training.durable.save.tensors.state import HostCopies
from training.durable.store.protocol import AnswerLostError, StoreError


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.store.gate.set()
    scene.context.metrics.close()


def test_training_goes_on_while_a_save_is_under_way(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    scene.weights.fill_(77.0)
    scene.checkpointer.poll()
    assert scene.committed() == []
    scene.store.gate.set()
    scene.finish()
    assert scene.committed() == [(1, 1.0)], "the state of the boundary, not of later"


def test_a_save_that_is_due_waits_for_the_one_under_way(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    threading.Timer(0.2, scene.store.gate.set).start()
    scene.begin(2)
    assert scene.store.gate.is_set(), "it came back when the save before it could end"
    scene.finish()
    assert scene.committed() == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("interval", ["1s", "auto"])
def test_an_interval_of_time_is_put_off_while_a_save_is_under_way(
    tmp_path: Path, interval: str
) -> None:
    scene = Scene(tmp_path, interval)
    scene.store.gate.clear()
    scene.begin(1)
    scene.schedule._last_started -= 100_000
    assert not scene.is_due(scene.position(2), 10)
    scene.store.gate.set()
    scene.finish()
    assert scene.is_due(scene.position(2), 10)
    scene.context.metrics.close()


def test_after_a_save_that_failed_the_next_comes_before_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, "1000steps")
    scene.store.error = StoreError("the disk is full")
    scene.begin(1)
    scene.finish()
    assert not scene.is_due(scene.position(2), 4000), "first it waits a little"
    monkeypatch.setattr(scene.schedule.failed, "_retry_at", 0.0)
    assert not scene.is_due(scene.position(1), 4000), "the same boundary has had its turn"
    assert scene.is_due(scene.position(2), 4000)
    scene.begin(2)
    scene.finish()
    assert not scene.is_due(scene.position(3), 4000)
    scene.context.metrics.close()


def test_fails_at_once_for_what_is_not_the_store_s(scene: Scene) -> None:
    scene.store.error = ValueError("a bug")
    scene.begin(1)
    assert scene.checkpointer.wait(120)
    with pytest.raises(ValueError, match="a bug"):
        scene.checkpointer.poll()


def test_fails_when_the_end_of_a_stage_cannot_be_saved(scene: Scene) -> None:
    scene.store.error = StoreError("the disk is full")
    with pytest.raises(StoreError, match="the disk is full"):
        scene.checkpointer.save(scene.request(2, "stage-end"))


def test_a_commit_is_told_of_in_a_line(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        scene.begin(step)
        scene.finish()
    told = [x for x in capsys.readouterr().out.splitlines() if x.startswith("[checkpoint]")]
    # The second came within seconds of the first.
    (line,) = told
    assert re.fullmatch(r"\[checkpoint\] step 1, periodic: 0\.\d MB committed in \d+\.\d\d s", line)


def test_the_files_of_a_save_that_failed_go_with_the_next_commit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lease, "publish", refuse_once(Lease.publish))
    scene.begin(1)
    scene.finish()
    assert len({key.split("/")[1] for key in scene.store.sizes("checkpoints/")}) == 1
    scene.begin(2)
    scene.finish()
    assert len(scene.context.lease.head.checkpoints) == 1
    wait_until_no_other_is_stored(scene)


def test_the_files_stay_when_only_the_answer_of_the_publication_was_lost(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_if = scene.store.put_if

    def without_answer(key: str, data: bytes, etag: str | None) -> str:
        monkeypatch.setattr(scene.store, "put_if", put_if)
        put_if(key, data, etag)
        raise StoreError("the connection broke")

    monkeypatch.setattr(scene.store, "put_if", without_answer)
    scene.begin(1)
    scene.finish()
    scene.begin(2)
    scene.finish()
    assert scene.committed() == [(1, 1.0), (2, 2.0)]


def test_a_commit_holds_though_what_it_replaced_could_not_be_deleted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        scene.begin(step)
        scene.finish()
    delete = refuse_once(type(scene.store).delete_below)
    monkeypatch.setattr(type(scene.store), "delete_below", delete)
    for step in (4, 5):
        scene.begin(step)
        scene.finish()
        assert scene.checkpointer.holds(scene.position(step))
    wait_until_no_other_is_stored(scene)


def wait_until_no_other_is_stored(scene: Scene) -> None:
    """What a commit replaced is deleted behind it."""
    named = {entry.name for entry in scene.context.lease.head.checkpoints}
    deadline = time.monotonic() + 120
    while (stored := {k.split("/")[1] for k in scene.store.sizes("checkpoints/")}) != named:
        assert time.monotonic() < deadline, f"{stored} instead of {named}"
        time.sleep(0.01)


def refuse_once(act: Callable[..., Any]) -> Callable[..., Any]:
    """`act`, which the store refuses the first time."""
    refusals = [StoreError("the store is away")]

    def call(*arguments: Any, **named: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return act(*arguments, **named)

    return call


def test_nothing_is_published_once_the_lease_is_lost(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    other = acquire(scene.store, "run-1", "i-2", 0.0, lambda s: False, lambda holder: None)
    assert isinstance(other, Lease)
    scene.store.gate.set()
    assert scene.checkpointer.wait(120)
    with pytest.raises(LeaseLostError):
        scene.checkpointer.poll()
    head = Head.read(scene.store)
    assert head == other.head
    assert head.checkpoints == ()
    with pytest.raises(LeaseLostError):
        scene.emergency(2, 60)
    assert Head.read(scene.store) == other.head


@pytest.mark.parametrize("where", ["upload", "publication"])
def test_a_save_whose_lease_is_lost_is_gone_before_the_process_ends(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Also where the training thread hears of it first: no take-over may come to sweep."""
    delete = scene.store.delete_below
    monkeypatch.setattr(
        scene.store, "delete_below", lambda prefix: (time.sleep(0.2), delete(prefix))
    )
    lease = scene.context.lease
    scene.store.gate.clear()
    scene.begin(1)
    other = acquire(scene.store, "run-1", "i-2", 0, lambda s: False, lambda holder: None)
    assert isinstance(other, Lease)
    if where == "upload":
        with pytest.raises(LeaseLostError):
            lease.beat()
    scene.store.gate.set()
    assert lease.lost.wait(120)
    scene.checkpointer.close()
    assert scene.store.sizes("checkpoints/") == {}
    assert list((Path(scene.store.uri) / "checkpoints").rglob("*.part")) == []


def test_a_checkpoint_that_a_successor_took_over_is_not_deleted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write that named and released it was done, its answer lost, and the next one was fast."""
    put_if, successors = scene.store.put_if, list[Lease]()

    def answer_lost(key: str, data: bytes, etag: str | None) -> str:
        tag = put_if(key, data, etag)
        if b'"released"' in data and not successors:
            monkeypatch.setattr(scene.store, "put_if", put_if)
            other = acquire(scene.store, "run-1", "i-2", 60, lambda s: False, lambda holder: None)
            assert isinstance(other, Lease)
            successors.append(other)
            raise AnswerLostError("no answer")
        return tag

    monkeypatch.setattr(scene.store, "put_if", answer_lost)
    with pytest.raises(LeaseLostError):
        scene.emergency(1, 60)
    assert [entry.step for entry in successors[0].head.checkpoints] == [1]
    assert scene.committed() == [(1, 1.0)], "the successor's newest checkpoint is whole"


def test_nothing_with_a_nan_is_published(scene: Scene) -> None:
    scene.begin(1)
    scene.finish()
    capture = scene.capture(2)
    scene.weights[5] = float("nan")
    scene.checkpointer.save_async(scene.request(2, live=capture))
    assert scene.checkpointer.wait(120)
    with pytest.raises(RunFailedError, match="step 2: w contains a NaN; nothing was published"):
        scene.checkpointer.poll()
    with pytest.raises(RunFailedError, match="w contains a NaN"):
        scene.checkpointer.save(scene.request(2, "stage-end", capture))
    assert scene.committed() == [(1, 1.0)]


def test_the_memory_of_the_copy_is_used_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.begin(1)
    scene.finish()
    monkeypatch.setattr("training.durable.save.tensors.state.available_bytes", lambda: 0)
    scene.begin(2)
    assert scene.checkpointer.is_saving, "no memory is needed for another copy"
    scene.finish()
    assert scene.committed() == [(1, 1.0), (2, 2.0)]


def test_the_memory_of_the_first_copy_is_taken_behind_the_training(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.checkpointer.prepare(scene.request(1, "periodic").state)
    preparing = scene.checkpointer._copies._preparing
    assert preparing is not None
    preparing.join()
    monkeypatch.setattr("training.durable.save.tensors.state.available_bytes", lambda: 0)
    scene.begin(1)
    assert scene.checkpointer.is_saving, "the memory is there"
    scene.finish()
    assert scene.committed() == [(1, 1.0)]


def test_a_state_that_memory_cannot_hold_twice_is_streamed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "training.durable.save.tensors.state.available_bytes", lambda: 600 * 1024 * 1024
    )
    monkeypatch.setattr(HostCopies, "spare_bytes", 600 * 1024 * 1024 - 3999)
    scene.begin(1)
    assert not scene.checkpointer.is_saving
    assert "memory cannot hold a copy of the state; streaming it" in capsys.readouterr().out
    assert scene.committed() == [(1, 1.0)]
    assert not scene.checkpointer.stage(scene.request(2, "emergency"))
    monkeypatch.setattr(HostCopies, "spare_bytes", 600 * 1024 * 1024 - 4000)
    scene.begin(2)
    assert scene.checkpointer.is_saving


def test_without_memory_for_a_copy_long_work_waits_for_a_commit_now_and_then(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopies, "spare_bytes", sys.maxsize)
    policy = CheckpointPolicy(
        scene.context, scene.checkpointer, 100, lambda: scene.capture(4), is_sharded=False
    )
    scene.checkpointer.last_cost = Cost(bytes=4000, save_seconds=60.0, upload_seconds=1940.0)
    for seconds, commits in ((100.0, 0), (25_000.0, 1)):
        scene.schedule._last_started = time.monotonic() - seconds
        policy.protect(scene.position(4), "compilation")
        assert len(scene.committed()) == commits, f"2,000 s to save, {seconds:.0f} after the last"


def test_after_a_save_that_stopped_training_a_whole_interval_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, "600s")
    monkeypatch.setattr(HostCopies, "spare_bytes", sys.maxsize)
    scene.store.bytes_per_second = 1.0

    def pass_time(seconds: float) -> None:
        scene.schedule._last_started -= seconds

    scene.store.pass_time = pass_time
    scene.begin(1)
    scene.context.metrics.close()
    assert scene.committed() == [(1, 1.0)], "after 4,000 s"
    assert not scene.is_due(scene.position(2), 100)


def test_a_new_best_is_due_at_once_and_marked(scene: Scene) -> None:
    best = {"step": 4, "value": 0.5}
    position = scene.position(4, evaluated_step=4, best=best)
    policy = CheckpointPolicy(
        scene.context, scene.checkpointer, 100, lambda: scene.capture(4), is_sharded=False
    )
    assert policy.save_if_due(position)
    scene.finish()
    assert not scene.is_due(position, 100)
    (entry,) = scene.context.lease.head.checkpoints
    assert (entry.kind, entry.is_best) == ("best", True)


@pytest.mark.parametrize(
    ("interval", "due"), [("3steps", [3, 6, 9]), ("2epochs", [8]), ("1epoch", [4, 8])]
)
def test_steps_and_epochs_are_kept_to_the_step(
    tmp_path: Path, interval: str, due: list[int]
) -> None:
    scene = Scene(tmp_path, interval)
    assert [s for s in range(1, 11) if scene.is_due(scene.position(s), 4)] == due
    scene.context.metrics.close()


def test_auto_says_what_it_chose_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, "auto")
    measure = scene.schedule.measure
    # Whatever this machine takes, the save costs a hundredth of a second.
    monkeypatch.setattr(scene.schedule, "measure", lambda *real: measure(0.01, 0.01))
    scene.begin(1)
    scene.finish()
    said = capsys.readouterr().out
    assert "[interval] auto: every 60.0 s: saving more often gains next to" in said
    assert "2.1 h between interruptions" in said
    assert '"kind":"interval"' in (tmp_path / "metrics.jsonl").read_text()
    scene.context.metrics.close()


def test_an_attempt_that_ends_finishes_the_save_under_way(scene: Scene) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    threading.Timer(0.1, scene.store.gate.set).start()
    scene.checkpointer.close()
    assert scene.committed() == [(1, 1.0)]


def test_an_attempt_that_lost_its_lease_ends_without_waiting(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.store.gate.clear()
    scene.begin(1)
    assert scene.store.is_at_gate.wait(120)
    save = scene.checkpointer._current
    assert save is not None
    scene.context.lease.lost.set()
    monkeypatch.setattr("training.durable.save.tensors.checkpointer._CLEANUP_SECONDS", 0.01)
    scene.checkpointer.close()
    assert not save.wait(0), "the save still hangs at the gate, and nobody waits for it"
    scene.store.gate.set()
    assert save.wait(120)
    assert scene.committed() == []


def test_how_long_a_run_trained_goes_with_the_checkpoint(scene: Scene) -> None:
    checkpointer = Checkpointer(scene.context, None, {"spent_seconds": 1000.0})
    policy = CheckpointPolicy(
        scene.context, checkpointer, 1, lambda: scene.capture(1), is_sharded=False
    )
    policy.save_stage_end(scene.position(1))
    snapshot = CheckpointContent.read(scene.store, scene.context.lease.head.checkpoints[-1])
    assert 1000.0 <= snapshot.state["spent_seconds"] < 1100.0
    assert snapshot.state["step"] == 1


def test_the_watchdog_hears_a_save_for_which_training_waits(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.store.bytes_per_second = 2000.0  # of 4,000 bytes: longer than a wait's piece
    heard: list[float] = []
    scene.context.supervisor.watchdog.beat = lambda: heard.append(0)  # type: ignore[method-assign]
    scene.checkpointer.save(scene.request(1))
    assert heard
    assert [step for step, _ in scene.committed()] == [1]
    scene.context.metrics.close()


@pytest.mark.parametrize("way", ["save", "save_async", "stage"])
def test_no_rank_is_asked_for_its_share_while_the_staged_copy_is_saved(
    scene: Scene, way: str
) -> None:
    """Its memory would be filled with a later step's, under the staged step's name."""
    orders = list[str]()
    leader = SimpleNamespace(
        order=lambda verb, name: orders.append(verb), have_staged=lambda is_copied: True
    )
    scene.checkpointer._leader = leader  # type: ignore[assignment]
    scene.checkpointer._write = lambda request, state: TensorSave(  # type: ignore[method-assign]
        scene.checkpointer._publisher, request, state
    )
    assert scene.checkpointer.stage(scene.request(1))
    act = partial(getattr(scene.checkpointer, way), scene.request(2))
    thread = threading.Thread(target=act)
    with scene.checkpointer._lock:  # as the last resort holds it until the end
        thread.start()
        thread.join(0.2)
        assert orders == ["stage"]
    thread.join(60)
    scene.finish()
    assert orders == ["stage", {"save": "live", "save_async": "copy", "stage": "stage"}[way]]
