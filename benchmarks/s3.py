"""Uploads and downloads of a checkpoint by ours and other clients of S3, all to one local sink.

Ours hashes every byte with SHA-256, as S3 does with what arrives and a resumed run with what it
reads; the others take a CRC or nothing. Sockets without any of that are the limit. And what an
upload behind a training that the interpreter bounds takes from its steps.
"""

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import boto3
import psutil

from benchmarks.s3_client import CLIENTS, KEEP, KEY

REPOSITORY = Path(__file__).parent.parent
_PEERS = (f"boto3[crt]=={boto3.__version__}", "obstore", "s5cmd")
_TITLES = {
    "raw": "raw sockets (the limit)",
    "ours": "ours (SHA-256)",
    "threads": "ours, by the trainer's threads",
    "boto3": "boto3 (s3transfer)",
    "crt": "awscrt (s3transfer)",
    "obstore": "obstore",
    "s5cmd": "s5cmd",
}
_OURS = ("ours", "threads")
_DIRECTIONS = ("upload", "download")


def measure(*, rounds: int, megabytes: int) -> list[dict[str, Any]]:
    """Alternate the clients, then the training; return a row each, medians over the rounds."""
    if rounds < 1 or megabytes < 1:
        raise ValueError(f"give at least 1 round and 1 megabyte, got {rounds} and {megabytes}")
    with tempfile.TemporaryDirectory() as name, open_server("benchmarks.s3_sink") as environment:
        python = _peers(Path(name))
        rows = []
        for direction in _DIRECTIONS:
            rows += _directed(direction, rounds, megabytes, python, environment)
        return rows + _training(rounds, megabytes, environment)


@contextmanager
def open_server(module: str) -> Iterator[dict[str, str]]:
    """A server of S3, which prints its port; yields the environment of its clients."""
    command = [sys.executable, "-m", module]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield {
            **os.environ,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{process.stdout.readline().strip()}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "PYTHONPATH": str(REPOSITORY),
        }
        process.stdin.close()


def _peers(folder: Path) -> Path:
    """An environment with the peers alone; its interpreter."""
    uv = [str(Path(sys.executable).with_name("uv")), "--quiet"]
    python = folder / "bin" / "python"
    subprocess.run([*uv, "venv", "--python", sys.executable, str(folder)], check=True)
    subprocess.run([*uv, "pip", "install", "--python", str(python), *_PEERS], check=True)
    return python


@dataclass(slots=True)
class _Client:
    """One client's process, and what its transfers took."""

    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def transfer(self) -> tuple[float, float]:
        """Have it transfer once; return the seconds and the CPU seconds of all its processes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        before, began = self._cpu_seconds(), time.perf_counter()
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != "done\n":
            raise RuntimeError(f"{self.process.args!r} has failed")
        return time.perf_counter() - began, self._cpu_seconds() - before

    def _cpu_seconds(self) -> float:
        own = psutil.Process(self.process.pid)
        times = [own.cpu_times(), *(child.cpu_times() for child in own.children(recursive=True))]
        # Those of children that have ended included.
        return float(sum(sum(one[:4]) for one in times))


def _directed(
    direction: str, rounds: int, megabytes: int, python: Path, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    if direction == "download":
        _keep(megabytes, environment["AWS_ENDPOINT_URL"])
    with ExitStack() as stack:
        clients = {}
        for name in CLIENTS:
            if (name, direction) == ("threads", "download"):
                continue  # there is one way to read
            process = stack.enter_context(_started(name, direction, megabytes, python, environment))
            clients[name] = _Client(process)
        for number in range(rounds + 1):
            for client in clients.values():
                seconds, cpu = client.transfer()
                if number:  # the first round warms up
                    client.seconds.append(seconds)
                    client.cpu.append(cpu)
        for client in clients.values():
            assert client.process.stdin is not None
            client.process.stdin.close()
    limit = statistics.median(clients["raw"].seconds)
    return [
        {
            "what": f"{direction}, {_TITLES[name]}",
            "GB/s": megabytes / 1000 / statistics.median(client.seconds),
            "x raw": limit / statistics.median(client.seconds),
            "CPU s/GB": statistics.median(client.cpu) / megabytes * 1000,
        }
        for name, client in clients.items()
    ]


def _started(
    name: str, direction: str, megabytes: int, python: Path, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    program = str(REPOSITORY / "benchmarks" / "s3_client.py")
    process = subprocess.Popen(
        [
            *(sys.executable if name in _OURS else str(python), program, name, direction),
            *(f"--megabytes={megabytes}", f"--endpoint={environment['AWS_ENDPOINT_URL']}"),
        ],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stdout: IO[str] | None = process.stdout
    assert stdout is not None
    if stdout.readline() != "ready\n":
        raise RuntimeError(f"{name} could not start")
    return process


def _keep(megabytes: int, endpoint: str) -> None:
    """Put the object that is downloaded."""
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    connection.request("PUT", f"/{KEEP}/{KEY}", body=os.urandom(10**6) * megabytes)
    connection.getresponse().read()
    connection.close()


def _training(rounds: int, megabytes: int, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.s3_training"]
    done = subprocess.run(
        [*command, f"--megabytes={megabytes}", f"--rounds={rounds}"],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    alone = found["alone"]["steps/s"]
    return [
        {"what": f"training, {name}", **row, "x alone": row["steps/s"] / alone}
        for name, row in found.items()
    ]
