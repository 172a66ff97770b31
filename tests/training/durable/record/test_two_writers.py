"""Two writers of one run: whatever a stale one does when it wakes, nothing of it counts."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.training import tiny
from tests.training.hooks import HUNG_SECONDS
from tests.training.runs import Run, assert_equal
from training.durable.record.head import Head
from training.durable.save.tensors.weights import weights_sha256
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import StoreError


def start(run: Run) -> BaseProcess:
    """An attempt without heartbeat: one suspended with the folder lock would block everything."""
    return run.fork("--lease-ttl-seconds=600")


def stop() -> None:
    """Stop all of this process; the calling thread may run on until another one has noticed."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)


def stop_at(place: str, number: int) -> None:
    """Let the next attempt stop itself there, as a machine that is suspended does."""

    def hook(reached: int) -> None:
        if reached == number:
            del tiny.HOOKS[place]
            time.sleep(0.5)  # a save behind this step must not be stopped with the folder's lock
            stop()

    tiny.HOOKS[place] = hook


def wait_until_stopped(process: BaseProcess) -> None:
    assert process.pid is not None
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"it ended instead: {status}"


def resume(process: BaseProcess) -> int | None:
    """Let it go on; its exit code."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    # os.waitpid would leave it among multiprocessing's active children for ever.
    process.join(HUNG_SECONDS)
    return process.exitcode


def left_of(run: Run) -> dict[str, object]:
    """What the run is: head, receipt, every file of every checkpoint, the final weights."""
    root = Path(run.uri)
    files = [root / "head.json", root / "receipt.json", *(root / "checkpoints").rglob("*")]
    contents = {str(p.relative_to(root)): p.read_bytes() for p in files if p.is_file()}
    # Not its bytes: the order of the header's fields is not fixed.
    return {**contents, "final": weights_sha256(load_file(root / "final/model.safetensors"))}


@pytest.mark.parametrize("place", [("first", 4), ("second", 0), ("first-evaluation", 5)])
def test_a_zombie_that_wakes_in_a_finished_run_commits_nothing(
    run: Run, whole: Run, place: tuple[str, int]
) -> None:
    stop_at(*place)
    zombie = start(run)
    tiny.HOOKS.clear()
    wait_until_stopped(zombie)
    assert run.attempt() == 0
    before = left_of(run)
    assert resume(zombie) == 76
    assert left_of(run) == before
    assert_equal(run, whole)


def test_a_zombie_that_wakes_beside_its_successor_commits_nothing(run: Run, whole: Run) -> None:
    stop_at("first", 7)
    zombie = start(run)
    tiny.HOOKS.clear()
    wait_until_stopped(zombie)
    known = {entry.name for entry in run.head.checkpoints}
    successor = run.fork()
    deadline = time.monotonic() + 120
    while run.head.generation == 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert resume(zombie) == 76
    successor.join(120)
    assert successor.exitcode == 0
    mine = {e.name for e in run.head.checkpoints if "-g0001-" in e.name}
    assert mine <= known
    assert_equal(run, whole)


@pytest.mark.parametrize("when", ["upload", "refused", "publication", "sweep", "final", "receipt"])
def test_a_zombie_that_stops_in_the_middle_of_a_commit_publishes_nothing_later(
    run: Run, whole: Run, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Stopped between the last part and the head, just before the head, or before a deletion.

    Or in a save of which one file is refused afterwards: its successor had swept the folder.
    """
    stopping = _stops_in(when)
    if when == "sweep":
        # Something to sweep: a checkpoint that was never published.
        FolderStore(Path(run.uri)).put("checkpoints/00000001-g0000-dead/state.json", b"{}")
        head = Head(run_id="run-1", generation=1, writer="i-0", nonce="n", state="released")
        FolderStore(Path(run.uri)).put("head.json", head.to_bytes())
    with monkeypatch.context() as patched:
        for name, method in stopping.items():
            patched.setattr(FolderStore, name, method)
        zombie = start(run)
        wait_until_stopped(zombie)
    assert run.attempt() == 0
    before = left_of(run)
    assert resume(zombie) == 76
    assert left_of(run) == before
    assert_equal(run, whole)


def _stops_in(when: str) -> dict[str, Callable[..., object]]:
    """Methods of the store that stop the process once, at the place."""
    stopped = []

    def stop_once() -> None:
        if not stopped:
            stopped.append(True)
            stop()

    put_if = FolderStore.put_if

    def before(method: str, prefix: str = "") -> dict[str, Callable[..., object]]:
        act = getattr(FolderStore, method)

        def stopping(self: FolderStore, key: str, *arguments: object) -> object:
            if key.startswith(prefix):
                stop_once()
            return act(self, key, *arguments)

        return {method: stopping}

    def stopping_put_if(self: FolderStore, key: str, data: bytes, etag: str | None) -> str:
        head = Head.read(self)
        if key == "head.json" and head and data.count(b'"step"') > len(head.checkpoints):
            stop_once()
        return put_if(self, key, data, etag)

    upload = FolderStore.upload

    def refused_upload(self: FolderStore, key: str, *arguments: Any) -> object:
        if not key.endswith("optimizer.safetensors") or stopped:
            return upload(self, key, *arguments)
        stop_once()
        raise StoreError(f"{key}: a successor has swept it")

    methods: dict[str, dict[str, Callable[..., object]]] = {
        "upload": before("upload"),
        "refused": {"upload": refused_upload},
        "publication": {"put_if": stopping_put_if},
        "final": before("put_file", "final/"),
        "sweep": before("delete_below"),
        "receipt": before("put", "receipt.json") | before("put_if", "receipt.json"),
    }
    return methods[when]
