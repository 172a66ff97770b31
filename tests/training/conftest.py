"""A small dataset, both kinds of store, and runs in this process or in a forked one."""

import faulthandler
import json
import multiprocessing
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

from rehearsal.aws.front import Front
from tests.training import tiny
from training.cli.main import main
from training.record.head import Head, read_head
from training.report.log import configure_logging
from training.store.open import open_store
from training.store.protocol import Store

WORKLOAD = "tests.training.tiny:TINY"


@pytest.fixture(autouse=True)
def _no_hooks() -> Iterator[None]:
    tiny.HOOKS.clear()
    yield
    tiny.HOOKS.clear()


@pytest.fixture(autouse=True)
def _print_log_lines() -> None:
    configure_logging()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "tiny"
    code = main(["data", "make", "--workload", WORKLOAD, "--out", str(out), "--count", "42"])
    assert code == 0
    return out


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The embedded AWS's own front, without the account that it fills at a start."""
    server = make_server("127.0.0.1", 0, Front({}), threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def bucket_uri(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    bucket = f"bucket-{secrets.token_hex(6)}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}"


@pytest.fixture(params=["folder", "s3"])
def store_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URI of each kind, where nothing is yet."""
    if request.param == "folder":
        return str(tmp_path / "store" / "run-1")
    return f"{request.getfixturevalue('bucket_uri')}/runs/run-1"


@dataclass
class Run:
    """One run of the tiny workload, attempt by attempt."""

    dataset: Path
    uri: str
    scratch: Path
    options: list[str] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return open_store(self.uri)

    @property
    def head(self) -> Head:
        head = read_head(self.store)
        assert head is not None
        return head

    def arguments(self, *more: str) -> list[str]:
        return [
            "run",
            f"--workload={WORKLOAD}",
            "--recipe=quick",
            f"--dataset-uri={self.dataset}",
            f"--run-uri={self.uri}",
            f"--scratch={self.scratch / secrets.token_hex(4)}",
            "--checkpoint-interval=3steps",
            "--lease-ttl-seconds=0.6",
            *self.options,
            *more,
        ]

    def attempt(self, *more: str) -> int:
        """In this process, on a machine that has nothing yet."""
        return main(self.arguments(*more))

    def fork(self, *more: str) -> multiprocessing.process.BaseProcess:
        """In a process of its own, which may be killed; torch is imported already."""
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_exit_with, args=(self.arguments(*more),))
        process.start()
        return process

    def fork_ranks(
        self, num_processes: int, *more: str
    ) -> list[multiprocessing.process.BaseProcess]:
        """The ranks of one attempt, as torchrun would start them; rank 0 first."""
        arguments = self.arguments(*more)
        meeting = self.scratch / f"rendezvous-{secrets.token_hex(4)}"
        meeting.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("fork")
        processes = []
        for rank in range(num_processes):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_processes),
                "TRAINING_RENDEZVOUS": meeting.as_uri(),
            }
            process = context.Process(target=_exit_with, args=(arguments, place))
            process.start()
            processes.append(process)
        return processes

    def attempt_with_ranks(self, num_processes: int, *more: str) -> list[int | None]:
        """Run the ranks to their end; their exit codes."""
        processes = self.fork_ranks(num_processes, *more)
        for process in processes:
            process.join(60)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        return codes

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """All metrics lines of a kind, oldest attempt first."""
        store = self.store
        lines = []
        for key in sorted(store.sizes("metrics/")):
            found = store.get(key)
            assert found is not None
            lines += [json.loads(line) for line in found.data.splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def lineage(self) -> dict[int, dict[str, Any]]:
        """Step lines by step: repeated ones counted once, the newest generation winning."""
        lines = sorted(self.lines("step"), key=lambda line: int(line["generation"]))
        return {line["step"]: line for line in lines}

    def losses(self) -> list[tuple[int, str, float, tuple[int, ...]]]:
        return [
            (step, line["stage"], line["loss"], tuple(line["ids"]))
            for step, line in sorted(self.lineage().items())
        ]

    def events(self, name: str) -> list[dict[str, Any]]:
        store = self.store
        events = []
        for key in sorted(store.sizes("events/")):
            found = store.get(key)
            assert found is not None
            events.append(json.loads(found.data))
        return [event for event in events if event["name"] == name]

    def json(self, key: str) -> dict[str, Any]:
        found = self.store.get(key)
        assert found is not None
        record: dict[str, Any] = json.loads(found.data)
        return record


def _exit_with(arguments: list[str], environment: Mapping[str, str] | None = None) -> None:
    os.environ.update(environment or {})
    if environment:
        # Where a rank hangs is shown, and no test waits for it longer.
        faulthandler.dump_traceback_later(40, exit=True, file=sys.__stderr__)
    raise SystemExit(main(arguments))


@pytest.fixture
def new_run(dataset: Path, tmp_path: Path) -> Callable[[str], Run]:
    def make(uri: str) -> Run:
        return Run(dataset=dataset, uri=uri, scratch=tmp_path / "scratch")

    return make


@pytest.fixture
def run(new_run: Callable[[str], Run], tmp_path: Path) -> Run:
    """A run in a folder."""
    return new_run(str(tmp_path / "runs" / "run-1"))


@pytest.fixture(scope="session")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted run that others are compared with."""
    root = tmp_path_factory.mktemp("whole")
    run = Run(dataset=dataset, uri=str(root / "runs" / "run-1"), scratch=root / "scratch")
    assert run.attempt() == 0
    return run


# A model that ranks share; and what else a boundary's state has: the average, the best state.
SHARDED = "--override=sharding=full"
AVERAGED = ["--override=ema_decay=0.9", "--override=best_metric=accuracy"]


@pytest.fixture(scope="session")
def sharded(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted run of two ranks that share a model."""
    root = tmp_path_factory.mktemp("sharded")
    run = Run(dataset=dataset, uri=str(root / "runs" / "run-1"), scratch=root / "scratch")
    run.options = [SHARDED, *AVERAGED]
    assert run.attempt_with_ranks(2) == [0, 0]
    return run


@pytest.fixture
def sharded_run(run: Run) -> Run:
    """A run like `sharded`, in a folder."""
    run.options = [SHARDED, *AVERAGED]
    return run
