"""A save to which every rank gives its share: kills, a store that fails, no room, silence."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp  # noqa: F401  (half a second that each fork would need)

from tests.training import tiny
from tests.training.damage import flip
from tests.training.hooks import both_ranks_end_in_time_where_one_hangs, during
from tests.training.runs import Run, assert_equal
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import StoreError


@pytest.fixture
def run(sharded_run: Run) -> Run:
    return sharded_run


def at_upload(
    monkeypatch: pytest.MonkeyPatch, step: int, name: str, act: Callable[[str], None]
) -> None:
    """Act in the saving process when it starts a file of a save of this step."""

    def patch(method: str) -> None:
        write = getattr(FolderStore, method)

        def acting(self: FolderStore, key: str, *arguments: Any) -> Any:
            if key.startswith(f"checkpoints/{step:08d}-") and key.endswith(name):
                act(key)
            return write(self, key, *arguments)

        monkeypatch.setattr(FolderStore, method, acting)

    patch("upload")
    patch("put")


def kill(key: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "name", [pytest.param("optimizer.rank-0001.safetensors", marks=pytest.mark.slow), "state.json"]
)
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before_it(
    run: Run, sharded: Run, name: str
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Nobody waits long for the rank that was killed.
        monkeypatch.setattr("training.durable.save.tensors.sharded_saves._SILENT_SECONDS", 2.0)
        at_upload(monkeypatch, 6, name, kill)
        codes = run.attempt_with_ranks(2)
    assert -signal.SIGKILL in codes
    assert 0 not in codes
    assert run.head.checkpoints[-1].step < 6
    assert run.attempt_with_ranks(2) == [0, 0]
    assert_equal(run, sharded)
    stored = {key.split("/")[1] for key in run.store.sizes("checkpoints/")}
    assert stored == {entry.name for entry in run.head.checkpoints}, "nothing is left of it"


def test_a_store_that_fails_one_rank_costs_that_save_alone(
    run: Run, sharded: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(key: str) -> None:
        raise StoreError(f"{key}: 503 Slow Down")

    with pytest.MonkeyPatch.context() as monkeypatch:
        at_upload(monkeypatch, 6, "model.rank-0001.safetensors", refuse)
        assert run.attempt_with_ranks(2) == [0, 0]
    assert "[save] step 6 was not saved, 1 in a row:" in capfd.readouterr().out
    (event,) = run.events("save-failed")
    assert event["step"] == 6
    assert "503 Slow Down" in event["message"]
    assert 6 not in [event["step"] for event in run.events("committed")]
    assert_equal(run, sharded)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_without_room_for_a_copy_streams_its_share(
    run: Run, sharded: Run, rank: int
) -> None:
    def free() -> int:
        return 0 if os.environ["RANK"] == str(rank) else 2**40

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("training.durable.save.tensors.state.available_bytes", free)
        assert run.attempt_with_ranks(2) == [0, 0]
    assert_equal(run, sharded)
    committed, others = ({e["step"] for e in r.events("committed")} for r in (run, sharded))
    assert committed >= others, "and before an evaluation, where a copy would have been staged"


def test_a_rank_that_is_silent_fails_the_save(
    run: Run, sharded: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("training.durable.save.tensors.sharded_saves._SILENT_SECONDS", 0.5)
        monkeypatch.setattr("training.durable.save.tensors.sharded_saves._TICK_SECONDS", 60.0)
        at_upload(monkeypatch, 6, "model.rank-0001.safetensors", lambda key: time.sleep(1.5))
        assert run.attempt_with_ranks(2) == [0, 0]
    assert "rank 1 wrote nothing for 0.5 s" in capfd.readouterr().out
    assert_equal(run, sharded)


def test_a_notice_in_long_work_has_every_rank_write_its_staged_share(
    run: Run, sharded: Run
) -> None:
    both_ranks_end_in_time_where_one_hangs(run)
    tiny.HOOKS.clear()
    assert run.attempt_with_ranks(2) == [0, 0]
    assert_equal(run, sharded)


@pytest.mark.parametrize(
    "why",
    [
        # Damage of every kind, by one rank: tests/training/durable/save/test_damage.py.
        pytest.param("does not match its checksum", marks=pytest.mark.slow),
        "403 Forbidden",
    ],
)
def test_a_share_that_cannot_be_used_is_passed_over_by_all_ranks(
    run: Run, sharded: Run, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    during("first", 7, lambda: None)
    assert run.attempt_with_ranks(2) == [75, 75]
    tiny.HOOKS.clear()
    newest, name = run.head.checkpoints[-1].name, "optimizer.rank-0001.safetensors"
    if "403" in why:
        forbid(monkeypatch, f"checkpoints/{newest}/{name}")
    else:
        flip(Path(run.uri) / "checkpoints" / newest / name, -1)
    assert run.attempt_with_ranks(2) == [0, 0]
    (passed_over,) = run.events("resumed")[-1]["passed_over"]
    assert passed_over["name"] == newest
    assert name in passed_over["why"]
    assert why in passed_over["why"]
    assert_equal(run, sharded)


def forbid(monkeypatch: pytest.MonkeyPatch, forbidden: str) -> None:
    """Let the store refuse to read a key."""
    read = FolderStore.read_into

    def refusing(self: FolderStore, key: str, start: int, data: memoryview) -> None:
        if key == forbidden:
            raise StoreError(f"{key}: 403 Forbidden")
        read(self, key, start, data)

    monkeypatch.setattr(FolderStore, "read_into", refusing)
