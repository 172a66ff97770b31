"""Staged files go to S3 from a process of their own: the same bytes, and no process is left."""

import hashlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import psutil
import pytest
import torch

from tests.training.forked import in_fork
from tests.training.runs import wait_for
from tests.training.save_scene import Scene
from training.durable.save.tensors.memory import open_shared
from training.durable.save.tensors.state import HostCopies, HostCopy, LiveState
from training.durable.store.folder import open_store
from training.durable.store.part_process import PartProcess
from training.durable.store.part_worker import _Order
from training.durable.store.protocol import LastingError
from training.durable.store.s3 import S3Store
from training.durable.store.transfer import TransferProgress, send


class S3Scene(Scene):
    """The checkpointer over a bucket, with a state of two parts and a few bytes."""

    def __init__(self, root: Path, uri: str) -> None:
        self._uri = uri
        super().__init__(root)
        self.weights = torch.zeros(3 * 2**20)

    def open_store(self, root: Path) -> Any:
        return open_store(self._uri)

    @property
    def worker(self) -> psutil.Process:
        """The process that sends."""
        return worker_of(self.store)

    @property
    def last_order(self) -> float:
        """When the process was last given an order, or has answered."""
        worker = self.store.part_process._worker
        assert worker is not None
        return worker._heard

    def num_open_uploads(self) -> int:
        bucket = self._uri.split("/")[2]
        return len(boto3.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", []))


@pytest.fixture
def scene(tmp_path: Path, bucket_uri: str) -> Iterator[S3Scene]:
    scene = S3Scene(tmp_path, f"{bucket_uri}/runs/run-1")
    yield scene
    scene.context.lease.release()
    scene.context.metrics.close()


def worker_of(store: S3Store) -> psutil.Process:
    """The process that sends for this store, once it takes orders."""
    assert store.part_process.is_ready()
    worker = store.part_process._worker
    assert worker is not None
    return psutil.Process(worker.process.pid)


def staged(store: S3Store, live: LiveState) -> HostCopy:
    copy = HostCopies(store.part_process).copy(live, None)
    assert copy is not None and copy.tensors.keys() == live.tensors.keys()
    return copy


def test_the_bytes_and_checksums_are_those_that_the_trainer_would_send(bucket_uri: str) -> None:
    store = open_store(bucket_uri)
    assert isinstance(store, S3Store)
    weights = torch.randn(5 * 2**20, generator=torch.Generator().manual_seed(1))
    live = LiveState(tensors={"model": {"w": weights}, "optimizer": {}}, state={})
    progress = TransferProgress()
    copy = staged(store, live)
    worker = worker_of(store)
    for number in (signal.SIGTERM, signal.SIGINT):  # the trainer answers them
        worker.send_signal(number)
    sent = send(store, "here/", copy.files, progress)
    assert progress.done_bytes == sum(file.size for file in copy.files)
    maps = Path(f"/proc/{worker.pid}/maps")
    wait_for(lambda: "host-copy" not in maps.read_text())  # memory of the trainer's to free
    worker.kill()
    worker.wait()
    assert sent == send(store, "there/", copy.files, TransferProgress())
    for file in sent:
        here, there = store.get(f"here/{file.name}"), store.get(f"there/{file.name}")
        assert here is not None and there is not None
        assert hashlib.sha256(here.data).digest() == hashlib.sha256(there.data).digest()


def test_a_killed_sender_is_a_failed_save_and_the_next_one_succeeds(
    scene: S3Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.begin(1)
    scene.finish()
    worker = scene.worker
    worker.suspend()
    heard = scene.last_order
    scene.begin(2)
    # Not only until the upload is begun: then the trainer could find the process dead, and send.
    wait_for(lambda: scene.last_order != heard)
    worker.kill()
    scene.finish()
    assert scene.schedule.failed.count == 1
    assert scene.num_open_uploads() == 0
    scene.begin(3)
    scene.finish()
    assert scene.committed() == [(1, 1.0), (3, 3.0)]
    assert scene.schedule.failed.count == 0
    assert not scene.store.part_process.start()
    assert caplog.text.count("the trainer now sends them itself") == 1


def test_a_sender_that_cannot_start_leaves_the_trainer_to_send(
    scene: S3Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "training.durable.store.part_process._PROGRAM", "training.durable.store.no_such_program"
    )
    scene.begin(1)
    scene.finish()
    assert scene.committed() == [(1, 1.0)]


def test_a_save_whose_time_is_over_stops_and_is_never_committed(scene: S3Scene) -> None:
    scene.begin(1)
    scene.finish()
    scene.worker.suspend()
    scene.begin(2)
    assert not scene.emergency(2, 0.5)
    scene.worker.resume()
    wait_for(lambda: scene.num_open_uploads() == 0)
    assert scene.committed() == [(1, 1.0)]


def test_a_failure_beside_withdraws_what_is_being_sent(
    scene: S3Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, is_ordered = scene.worker, threading.Event()
    give_order = PartProcess.send

    def send_and_tell(*arguments: Any) -> Any:
        is_ordered.set()
        return give_order(*arguments)

    def fail() -> None:
        assert is_ordered.wait(60)
        resumes.start()
        raise ValueError("this one")

    monkeypatch.setattr(PartProcess, "send", send_and_tell)
    resumes = threading.Timer(0.2, worker.resume)
    worker.suspend()
    copy = staged(scene.store, scene.capture(1))
    with pytest.raises(ValueError, match="this one"):
        send(scene.store, "x/", copy.files, TransferProgress(), tasks=[fail])
    resumes.join()
    assert scene.num_open_uploads() == 0
    assert "x/model.safetensors" not in scene.store.sizes("x/")


def test_a_sender_without_the_trainers_credentials_leaves_it_to_send(
    scene: S3Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine's role is asked for them by each process, and may not answer the second one."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    scene.begin(1)
    scene.finish()
    scene.begin(2)
    scene.finish()
    assert scene.committed() == [(2, 2.0)]


def test_a_sender_reports_what_no_other_machine_mends(bucket_uri: str) -> None:
    """What it was refused by name, not only in words."""
    sender, (ours, theirs) = PartProcess(bucket_uri, ""), socket.socketpair()
    store: Any = open_store(bucket_uri)
    store.patience.is_reached = True
    memory = os.memfd_create("parts")
    os.ftruncate(memory, 1)
    order = {"where": {}, "deadline": "inf", "size": 1, "part_bytes": 1, "is_fast": False}

    def refuse(*_: Any) -> str:
        raise LastingError("the key is off")

    store.put_part = refuse
    placed = _Order(store, json.dumps(order).encode(), memory, theirs.detach())
    for task in placed.tasks():
        task()
    worker: Any = SimpleNamespace(
        ordered=lambda *_: nullcontext(ours),
        next_answer=lambda answers, _: json.loads(answers.recv(1000)),
    )
    sender._worker = worker
    with pytest.raises(LastingError, match="the key is off"):
        list(sender.send(order, memory, lambda: False))
    ours.close()
    placed._answers.close()


def test_a_sender_that_falls_silent_is_ended(
    scene: S3Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no later save would come, and the end of the stage would wait for ever."""
    monkeypatch.setattr("training.durable.store.part_process._SILENT_SECONDS", 0.5)
    worker = scene.worker
    worker.suspend()
    scene.begin(1)
    scene.finish()
    assert not worker.is_running()
    scene.begin(2)
    scene.finish()
    assert scene.committed() == [(2, 2.0)]


def test_what_is_withdrawn_ends_although_answers_keep_coming(bucket_uri: str) -> None:
    store, size = S3Store(bucket_uri.removeprefix("s3://"), ""), 400
    assert store.part_process.is_ready()
    upload = store.upload("x", size, 1, threading.Event())
    sent = list(upload.put_shared(open_shared(size), size, 1, lambda: True))
    upload.abort()
    assert len(sent) < size


def test_it_starts_among_many_open_files_and_beside_a_folder_of_our_name(
    bucket_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    with ExitStack() as files:
        for _ in range(1024):
            files.enter_context(Path(os.devnull).open())
        store = S3Store(bucket_uri.removeprefix("s3://"), "")
        worker = worker_of(store)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.getsid(worker.pid) == worker.pid  # or its threads would take from training's share
    assert worker.nice() == psutil.Process().nice() + 5
    weight = Path(f"/proc/{worker.pid}/autogroup")
    if weight.exists() and os.geteuid() == 0:  # others may be told to try again
        assert weight.read_text().endswith("nice 5\n")


def test_a_killed_trainer_leaves_no_sender(bucket_uri: str) -> None:
    """Not even while a process that the trainer forked, like a loader's, lives on."""
    reader, writer = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        store = S3Store(bucket_uri.removeprefix("s3://"), "")
        pid = worker_of(store).pid
        loader = os.fork()
        if loader:
            os.write(writer, f"{loader} {pid}".encode())
        time.sleep(600)
    loader, pid = map(int, os.read(reader, 100).split())
    try:
        worker = psutil.Process(pid)
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
        assert psutil.pid_exists(loader)
    finally:
        os.kill(loader, signal.SIGKILL)


@pytest.mark.parametrize("moment", ["before it starts", "before it is heard"])
def test_a_sender_whose_trainer_has_ended_says_nothing(bucket_uri: str, moment: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    trainer = os.getpid()
    if moment == "before it starts":
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        trainer = ended.pid
    command = [
        sys.executable,
        "-m",
        "training.durable.store.part_worker",
        str(trainer),
        "bucket",
        "",
    ]
    with theirs, subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE) as worker:
        if moment == "before it is heard":
            assert select.select([ours], [], [], 60)[0]
        ours.close()
        assert worker.communicate()[1] == b""
        assert worker.returncode == 0


def test_a_fork_has_a_sender_of_its_own(bucket_uri: str) -> None:
    store = open_store(bucket_uri)
    assert isinstance(store, S3Store)
    live = LiveState(tensors={"model": {"w": torch.ones(9)}}, state={})
    send(store, "parent/", staged(store, live).files, TransferProgress())
    worker = worker_of(store)

    def send_in_fork() -> int:
        send(store, "fork/", staged(store, live).files, TransferProgress())
        own = worker_of(store)
        own.kill()
        return own.pid

    assert in_fork(send_in_fork) != worker.pid
    send(store, "again/", staged(store, live).files, TransferProgress())
    assert worker_of(store) == worker
    for name in ("parent", "fork", "again"):
        assert list(store.sizes(f"{name}/")) == [f"{name}/model.safetensors"]
