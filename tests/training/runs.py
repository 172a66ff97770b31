"""Runs of the tiny workload, in this process or in forked ones, and how they compare."""

import faulthandler
import fcntl
import json
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from training.cli.main import main
from training.durable.record.head import Head
from training.durable.record.history import History
from training.durable.record.metrics import Events
from training.durable.store.folder import open_store
from training.durable.store.protocol import Store

ROOT = Path(__file__).parents[2]
WORKLOAD = "tests.training.tiny:TINY"
# A model that ranks share; and what else a boundary's state has: the average, the best state.
SHARDED = "--override=sharding=full"
AVERAGED = ["--override=ema_decay=0.9", "--override=best_metric=accuracy"]
# Micro-batches, and with them the noise, of which every number of ranks gets whole ones.
DOUBLE = ["--override=double=true", "--override=batch_norm=false", "--override=micro_batch=2"]


class KeptRun:
    """A run as its store has it."""

    uri: str

    @property
    def store(self) -> Store:
        return open_store(self.uri)

    @property
    def head(self) -> Head:
        head = Head.read(self.store)
        assert head is not None
        return head

    def json(self, key: str) -> dict[str, Any]:
        found = self.store.get(key)
        assert found is not None, key
        record: dict[str, Any] = json.loads(found.data)
        return record

    @property
    def page(self) -> str:
        """Its report."""
        found = self.store.get("report.html")
        assert found is not None
        return found.data.decode()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of this name, oldest first."""
        return Events.read(self.store, name)

    def suspend(self, pid: int) -> None:
        """Stop a writer of a run in a folder, but not while it holds the folder's lock.

        Whoever is stopped with that keeps everybody else from writing.
        """
        with (Path(self.uri) / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.kill(pid, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])


@dataclass
class Run(KeptRun):
    """One run of the tiny workload, attempt by attempt."""

    dataset: Path | str
    uri: str
    scratch: Path
    options: list[str] = field(default_factory=list)
    at_start: Callable[[], None] | None = None  # called in each forked process, before the attempt

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
        """Run an attempt in this process, with an empty scratch folder."""
        return main(self.arguments(*more))

    def fork(self, *more: str) -> multiprocessing.process.BaseProcess:
        """Start an attempt in a forked process, which may be killed; torch is already imported."""
        context = multiprocessing.get_context("fork")
        process = context.Process(
            target=_exit_with, args=(self.arguments(*more), {}, self.at_start)
        )
        process.start()
        return process

    def attempt_in_fork(self, *more: str) -> int | None:
        """Run an attempt in a process of its own to its end; its exit code."""
        process = self.fork(*more)
        process.join(300)
        return process.exitcode

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
            process = context.Process(target=_exit_with, args=(arguments, place, self.at_start))
            process.start()
            processes.append(process)
        return processes

    def attempt_with_ranks(self, num_processes: int, *more: str) -> list[int | None]:
        """Run the ranks to their end; their exit codes."""
        return ended(self.fork_ranks(num_processes, *more))

    def fork_hosts(self, num_hosts: int, *more: str) -> list[multiprocessing.process.BaseProcess]:
        """The hosts of one attempt, one rank each and apart from each other; the leader first."""
        names = ["127.0.0.1", *(f"127.0.0.{k}" for k in range(2, num_hosts + 1))]
        listed = ",".join([f"{names[0]}:{free_port()}", *names[1:]])
        context = multiprocessing.get_context("fork")
        processes = []
        for name in names:
            arguments = self.arguments(f"--hosts={name}@{listed}", f"--writer={name}", *more)
            place = {"TEST_HOST": name}
            process = context.Process(target=_exit_with, args=(arguments, place, self.at_start))
            process.start()
            processes.append(process)
        return processes

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """All metrics lines of a kind, oldest attempt first."""
        return [line for line in History.line_reader(self.store).new() if line["kind"] == kind]

    def lineage(self) -> dict[int, dict[str, Any]]:
        """Step lines by step: repeated ones counted once, the newest generation winning."""
        lines = sorted(self.lines("step"), key=lambda line: int(line["generation"]))
        return {line["step"]: line for line in lines}

    def losses(self) -> list[tuple[int, str, float, tuple[str, str]]]:
        """Of each step its number, stage, loss and the digests of its samples."""
        return [
            (step, line["stage"], line["loss"], (line["ids_sum"], line["ids_crc"]))
            for step, line in sorted(self.lineage().items())
        ]


def ended(processes: list[multiprocessing.process.BaseProcess]) -> list[int | None]:
    """The exit codes of processes, which are waited for."""
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _exit_with(
    arguments: list[str], environment: Mapping[str, str], at_start: Callable[[], None] | None
) -> None:
    os.environ.update(environment)
    if environment:
        # Where a rank hangs is shown, and no test waits for it longer.
        faulthandler.dump_traceback_later(100, exit=True, file=sys.__stderr__)
    if at_start is not None:
        at_start()
    raise SystemExit(main(arguments))


def assert_equal(run: Run, whole: Run) -> None:
    assert run.head.state == "finished"
    assert run.head.weights_sha256 == whole.head.weights_sha256
    assert run.losses() == whole.losses()
    ours, theirs = run.json("receipt.json"), whole.json("receipt.json")
    assert ours["stages"] == theirs["stages"]
    assert ours["numerics_changed"] == [], ours["numerics_changed"]


def assert_close(run: Run, other: Run, tolerance: float) -> None:
    for (step, _, loss, ids), (other_step, _, other_loss, other_ids) in zip(
        run.losses(), other.losses(), strict=True
    ):
        assert (step, ids) == (other_step, other_ids)
        assert loss == pytest.approx(other_loss, rel=tolerance, abs=tolerance), step


def wait_for(is_so: Callable[[], bool]) -> None:
    """Return once it is so; fail when it has not come about in two minutes."""
    give_up_at = time.perf_counter() + 120
    while not is_so():
        assert time.perf_counter() < give_up_at, "it did not come about"
        time.sleep(0.02)
