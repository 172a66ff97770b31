"""One life of the script on a machine that is lost: alone, with `aws s3 sync`, or run by us."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("script.py")
AWS = Path(sys.executable).with_name("aws")
_COMMITTED = re.compile(r"\[snapshot\] .* committed in ([0-9.]+) s")
_LIMIT_SECONDS = 300.0


@dataclass(kw_only=True, slots=True)
class Life:
    """What was seen until the machine was lost; times are of this process's clock."""

    found: str = ""
    restored: int = 0  # the number of the checkpoint that it began with
    steps: list[float] = field(default_factory=list)  # seconds of each
    saves: list[float] = field(default_factory=list)
    written: list[tuple[float, int]] = field(default_factory=list)  # when, which checkpoint
    safe: list[float] = field(default_factory=list)  # seconds from written to safe

    def note_safe(self, began: float, ended: float) -> None:
        """What was written before `began` is safe since `ended`."""
        if before := [when for when, _ in self.written if when <= began]:
            self.safe.append(ended - before[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The size of the work, the store, and where the machines lie."""

    megabytes: int  # of each of the two files; a third of twice the size never changes
    steps: int  # between two checkpoints
    bucket: str
    environment: Mapping[str, str]

    @property
    def script(self) -> list[str]:
        """The script's options."""
        return ["--megabytes", str(self.megabytes), "--steps", str(self.steps)]


def alone(setting: Setting, machine: Path, num_checkpoints: int) -> Life:
    """The script by itself."""
    folder = machine / "checkpoints"
    folder.mkdir(parents=True)
    command = [sys.executable, str(SCRIPT), *setting.script, "--folder", str(folder)]
    return _live(command, setting, num_checkpoints)


def synced(setting: Setting, machine: Path, num_checkpoints: int) -> Life:
    """Beside a loop of `aws s3 sync`, without a pause; restored by the same command."""
    folder, uri = machine / "checkpoints", f"s3://{setting.bucket}/synced"
    folder.mkdir(parents=True)
    _sync(setting, uri, str(folder))
    command = [sys.executable, str(SCRIPT), *setting.script, "--folder", str(folder)]
    stop = threading.Event()
    life = Life()
    loop = threading.Thread(target=_sync_loop, args=(setting, folder, uri, life, stop))
    loop.start()
    try:
        return _live(command, setting, num_checkpoints, life, at_end=stop.set)
    finally:
        stop.set()
        loop.join()


def mirrored(setting: Setting, machine: Path, num_checkpoints: int) -> Life:
    """Run by us, the script unchanged: a snapshot when the folder is quiet."""
    return _run_by_us(setting, machine, num_checkpoints, "mirrored", "")


def committed(setting: Setting, machine: Path, num_checkpoints: int) -> Life:
    """Run by us, with one line more in the script."""
    return _run_by_us(setting, machine, num_checkpoints, "committed", " --commit")


def _run_by_us(setting: Setting, machine: Path, num_checkpoints: int, run: str, more: str) -> Life:
    source = machine / "source"
    source.mkdir(parents=True)
    (source / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    program = " ".join(["python", SCRIPT.name, *setting.script]) + more
    command = [sys.executable, "-m", "training", "run", "--program", program]
    command += ["--source", str(source), "--run-uri", f"s3://{setting.bucket}/runs/{run}"]
    command += ["--scratch", str(machine), "--ml-root", str(machine / "ml")]
    command += ["--quiet-seconds", "0.3", "--lease-ttl-seconds", "1"]
    # config.json knows the script by its folder's content, whatever the machine.
    return _live(command, setting, num_checkpoints)


def _live(
    command: Sequence[str],
    setting: Setting,
    num_checkpoints: int,
    life: Life | None = None,
    at_end: Callable[[], None] = lambda: None,
) -> Life:
    """Run until it has written so many checkpoints, and a moment more; then SIGKILL for all."""
    life = life or Life()
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=dict(setting.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    overdue = threading.Timer(_LIMIT_SECONDS, process.kill)
    overdue.start()
    said: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said.append(line)
            _note(life, line)
            if len(life.written) >= num_checkpoints:
                # Anywhere in the time between two checkpoints, by the number of this one.
                period = sum(life.steps[-setting.steps :])
                time.sleep(period * (life.written[-1][1] * 0.37 % 1.3))
                break
    finally:
        at_end()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        overdue.cancel()
        process.stdout.close()
        process.wait()
    if len(life.written) < num_checkpoints:
        raise RuntimeError("the script ended by itself:\n" + "".join(said[-20:]))
    return life


def _note(life: Life, line: str) -> None:
    now = time.monotonic()
    if match := _COMMITTED.search(line):
        life.note_safe(now - float(match[1]), now)
        return
    if not line.startswith("{"):
        return
    record: dict[str, Any] = json.loads(line)
    if "found" in record:
        life.found, life.restored = record["found"], record["number"]
    else:
        life.written.append((now, record["wrote"]))
        life.steps += record["steps"]
        life.saves.append(record["saved"])


def _sync_loop(setting: Setting, folder: Path, uri: str, life: Life, stop: threading.Event) -> None:
    while not stop.is_set():
        began = time.monotonic()
        if _sync(setting, str(folder), uri, stop):
            life.note_safe(began, time.monotonic())


def _sync(setting: Setting, source: str, target: str, stop: threading.Event | None = None) -> bool:
    """One `aws s3 sync`; killed when `stop` is set; whether it came to its end."""
    process = subprocess.Popen(
        [str(AWS), "s3", "sync", "--only-show-errors", source, target],
        env=dict(setting.environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None:
        if stop is not None and stop.wait(0.05):
            process.kill()
        elif stop is None:
            process.wait()
    return process.returncode == 0


@contextlib.contextmanager
def open_s3(bucket: str) -> Iterator[dict[str, str]]:
    """A server with the bucket; yields the environment of its clients."""
    command = [sys.executable, "-m", "benchmarks.program.s3_server"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{process.stdout.readline().strip()}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        subprocess.run(
            [str(AWS), "s3", "mb", f"s3://{bucket}"], env=environment, check=True, stdout=-3
        )
        yield environment
        process.stdin.close()
