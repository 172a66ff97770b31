"""A dataset from S3 to a folder: ours beside other clients, against one local sink.

Many small files, and a few large ones. Ours starts an interpreter, verifies every byte against the
manifest and puts each file in place whole; the others verify nothing, but for one row that hashes
afterwards. Whole commands are measured, as a boot runs them.
"""

import hashlib
import http.client
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.s3 import open_sink

REPOSITORY = Path(__file__).parent.parent
PEERS = REPOSITORY / ".venv-peers" / "bin"
_BUCKET = "keep"
_SUMS = "sums"


def measure(
    *, rounds: int, files: int, kilobytes: int, large: int, megabytes: int
) -> list[dict[str, Any]]:
    """Alternate the clients; return a row each, medians over the rounds."""
    if min(rounds, files, kilobytes, large, megabytes) < 1:
        raise ValueError("give at least 1 of everything")
    if not (PEERS / "python").exists():
        raise ValueError("the peers are not installed; run `make peers` first")
    kinds = {"small": (files, kilobytes * 1000), "large": (large, megabytes * 1_000_000)}
    rows = []
    with tempfile.TemporaryDirectory() as name, open_sink() as environment:
        folder = Path(name)
        for kind, (count, size) in kinds.items():
            keys = _put(kind, count, size, environment["AWS_ENDPOINT_URL"], folder)
            (folder / "keys").write_text("\n".join(keys))
            rows += _kind(kind, count, count * size, rounds, folder, environment)
    return rows


def _put(kind: str, count: int, size: int, endpoint: str, folder: Path) -> list[str]:
    """Put files of random bytes and their manifest; return their keys."""
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))

    def put(name: str, body: bytes) -> None:
        connection.request("PUT", f"/{_BUCKET}/{kind}/{name}", body=body)
        connection.getresponse().read()

    entries, sums = [], []
    for number in range(count):
        body = os.urandom(size)
        name, digest = f"{number:06d}.bin", hashlib.sha256(body).hexdigest()
        put(name, body)
        entries.append({"name": name, "bytes": size, "sha256": digest})
        sums.append(f"{digest}  {name}\n")
    manifest = {"format": 1, "workload": "benchmark", "name": kind, "files": entries, "meta": {}}
    put("manifest.json", json.dumps(manifest).encode())
    (folder / _SUMS).write_text("".join(sums))
    connection.close()
    return [f"{kind}/{entry['name']}" for entry in entries]


def _commands(kind: str, folder: Path) -> dict[str, list[str]]:
    """By client, the command that fetches the files into `folder`/out."""
    out, keys = str(folder / "out"), str(folder / "keys")
    uri = f"s3://{_BUCKET}/{kind}"
    # The program itself: what the package installs starts it from a Python.
    (program,) = PEERS.parent.glob("lib/*/site-packages/s5cmd/bin/s5cmd")
    s5cmd = [str(program), "cp", f"{uri}/*", f"{out}/"]
    verify = f'"$@" && cd {out} && sha256sum --check --quiet ../{_SUMS}'
    client = [str(PEERS / "python"), str(REPOSITORY / "benchmarks" / "sync_client.py")]
    ours = [sys.executable, "-m", "training", "data", "sync", "--dataset-uri", uri, "--out", out]
    # The sink has no MD5 to compare with.
    rclone = [str(PEERS / "rclone"), "copy", "--transfers=16", "--ignore-checksum"]
    rclone += [f"sink:{_BUCKET}/{kind}", out]
    aws = str(Path(sys.executable).with_name("aws"))
    return {
        "ours (verified)": ours,
        "s5cmd": s5cmd,
        "s5cmd, then sha256sum": ["bash", "-c", verify, "bash", *s5cmd],
        "rclone": rclone,
        "obstore": [*client, "obstore", keys, out],
        "boto3 + CRT": [*client, "crt", keys, out],
        "aws s3 sync": [aws, "s3", "sync", "--only-show-errors", uri, out],
    }


def _kind(
    kind: str, count: int, size: int, rounds: int, folder: Path, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    taken: dict[str, list[tuple[float, float]]] = {}
    commands = _commands(kind, folder)
    for _ in range(rounds):
        for name, command in commands.items():
            taken.setdefault(name, []).append(_timed(command, count, folder, environment))
    seconds = {name: statistics.median(wall for wall, _ in each) for name, each in taken.items()}
    cpu = {name: statistics.median(used for _, used in each) for name, each in taken.items()}
    best = min(value for name, value in seconds.items() if not name.startswith("ours"))
    return [
        {
            "what": f"{kind}, {name}",
            "files/s": count / seconds[name],
            "GB/s": size / 1e9 / seconds[name],
            "x best peer": best / seconds[name],
            "CPU s/GB": cpu[name] / size * 1e9,
        }
        for name in commands
    ]


def _timed(
    command: list[str], count: int, folder: Path, environment: Mapping[str, str]
) -> tuple[float, float]:
    """Seconds, and CPU seconds of all its processes, of one command into a new folder."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    rclone = {"TYPE": "s3", "PROVIDER": "Other", "ENV_AUTH": "true", "LIST_VERSION": "2"}
    settings = {f"RCLONE_CONFIG_SINK_{name}": value for name, value in rclone.items()}
    settings["RCLONE_CONFIG_SINK_ENDPOINT"] = environment["AWS_ENDPOINT_URL"]
    settings["S3_ENDPOINT_URL"] = environment["AWS_ENDPOINT_URL"]
    before, began = _children_cpu(), time.perf_counter()
    done = subprocess.run(
        command, env={**environment, **settings}, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    there = len(list(out.glob("*.bin")))
    if done.returncode or there != count:
        raise RuntimeError(f"{command[0]} left {there} of {count} files: {done.stderr[-2000:]}")
    return seconds, _children_cpu() - before


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
