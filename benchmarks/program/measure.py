"""A program's checkpoints on machines that are lost: alone, with `aws s3 sync`, or run by us.

Alternates the ways: steps, safety, bytes, and what the next machine finds.
"""

import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.s3 import open_server
from training.proof.machine import live, run_command

_SCRIPT = Path(__file__).with_name("script.py")
_AWS = Path(sys.executable).with_name("aws")
_BUCKET = "benchmark"
_COMMITTED = re.compile(r"\[snapshot\] .* committed in ([0-9.]+) s")
_LIMIT_SECONDS = 300.0
_POLL_SECONDS = 0.01
# What a lost machine's successor may find.
_FOUND = ("whole", "torn pair", "half a file", "nothing")


@dataclass(kw_only=True, slots=True)
class ScriptLife:
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

    def note(self, line: str) -> None:
        """Note what a line of the script's or of the trainer's output says."""
        now = time.monotonic()
        if match := _COMMITTED.search(line):
            self.note_safe(now - float(match[1]), now)
        elif line.startswith("{"):
            record: dict[str, Any] = json.loads(line)
            if "found" in record:
                self.found, self.restored = record["found"], record["number"]
            else:
                self.written.append((now, record["wrote"]))
                self.steps += record["steps"]
                self.saves.append(record["saved"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The size of the work, and the environment that has the store."""

    megabytes: int  # of each of the two files; a third of twice the size never changes
    steps: int  # between two checkpoints
    environment: Mapping[str, str]

    @property
    def script(self) -> list[str]:
        """The script's options."""
        return ["--megabytes", str(self.megabytes), "--steps", str(self.steps)]


def alone(setting: Setting, machine: Path, num_checkpoints: int) -> ScriptLife:
    """The script by itself."""
    folder = machine / "checkpoints"
    folder.mkdir(parents=True)
    command = [sys.executable, str(_SCRIPT), *setting.script, "--folder", str(folder)]
    return _live(command, setting, machine, num_checkpoints, ScriptLife())


def synced(setting: Setting, machine: Path, num_checkpoints: int) -> ScriptLife:
    """Beside a loop of `aws s3 sync`, without a pause; restored by the same command."""
    folder, uri = machine / "checkpoints", f"s3://{_BUCKET}/synced"
    folder.mkdir(parents=True)
    _sync(setting, uri, str(folder))
    command = [sys.executable, str(_SCRIPT), *setting.script, "--folder", str(folder)]
    life, stop = ScriptLife(), threading.Event()

    def sync() -> None:
        while not stop.is_set():
            began = time.monotonic()
            if _sync(setting, str(folder), uri, stop):
                life.note_safe(began, time.monotonic())

    loop = threading.Thread(target=sync)
    loop.start()
    try:
        return _live(command, setting, machine, num_checkpoints, life, at_end=stop.set)
    finally:
        stop.set()
        loop.join()


def run_by_us(
    setting: Setting, machine: Path, num_checkpoints: int, *, commits: bool
) -> ScriptLife:
    """A snapshot when the folder is quiet, or when one line more in the script says so."""
    source = machine / "source"
    source.mkdir(parents=True)
    # config.json knows the script by its folder's content, whatever the machine.
    (source / _SCRIPT.name).write_bytes(_SCRIPT.read_bytes())
    program = " ".join(["python", _SCRIPT.name, *setting.script, *["--commit"] * commits])
    uri = f"s3://{_BUCKET}/runs/{'committed' if commits else 'mirrored'}"
    options = [f"--program={program}", f"--source={source}", "--quiet-seconds=0.3"]
    command = run_command(machine, uri, options)
    return _live(command, setting, machine, num_checkpoints, ScriptLife())


_ALONE = "the script alone"
_WAYS: Mapping[str, Callable[[Setting, Path, int], ScriptLife]] = {
    _ALONE: alone,
    "aws s3 sync in a loop": synced,
    "ours, script unchanged": partial(run_by_us, commits=False),
    "ours, with commit()": partial(run_by_us, commits=True),
}


def _live(
    command: Sequence[str],
    setting: Setting,
    machine: Path,
    num_checkpoints: int,
    life: ScriptLife,
    at_end: Callable[[], None] = lambda: None,
) -> ScriptLife:
    """Run until it has written so many checkpoints, and a moment more."""
    log, end = machine / "log", time.monotonic() + _LIMIT_SECONDS
    log.touch()
    unread = ""

    def is_due() -> bool:
        nonlocal unread
        *lines, unread = (unread + output.read()).split("\n")
        for line in lines:
            life.note(line)
        if len(life.written) < num_checkpoints:
            return time.monotonic() >= end
        # Anywhere in the time between two checkpoints, by the number of this one.
        when, number = life.written[num_checkpoints - 1]
        period = sum(life.steps[-setting.steps :])
        return time.monotonic() >= when + period * (number * 0.37 % 1.3)

    def is_lost() -> bool:
        if is_due():
            at_end()
            return True
        return False

    with log.open() as output:
        environment = setting.environment
        live(command, log, is_lost=is_lost, poll_seconds=_POLL_SECONDS, environment=environment)
    if len(life.written) < num_checkpoints:
        raise RuntimeError("the script ended by itself:\n" + log.read_text()[-2000:])
    return life


def _sync(setting: Setting, source: str, target: str, stop: threading.Event | None = None) -> bool:
    """One `aws s3 sync`; killed when `stop` is set; whether it came to its end."""
    process = subprocess.Popen(
        [str(_AWS), "s3", "sync", "--only-show-errors", source, target],
        env=dict(setting.environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None:
        if stop is None:
            process.wait()
        elif stop.wait(0.05):
            process.kill()
    return process.returncode == 0


def measure(*, num_lives: int, megabytes: int, steps: int) -> list[dict[str, Any]]:
    """Return a row for each way; a life ends by SIGKILL after 2 to 4 checkpoints."""
    if num_lives < 2 or megabytes < 1 or steps < 1:
        raise ValueError(
            f"give at least 2 lives, 1 megabyte and 1 step, got {num_lives}, {megabytes}, {steps}"
        )
    seen: dict[str, list[ScriptLife]] = {way: [] for way in _WAYS}
    sent = dict.fromkeys(_WAYS, 0)
    with (
        tempfile.TemporaryDirectory() as name,
        open_server("benchmarks.program.s3_server") as served,
    ):
        environment = {**served, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        made = [str(_AWS), "s3", "mb", f"s3://{_BUCKET}"]
        subprocess.run(made, env=environment, check=True, stdout=subprocess.DEVNULL)
        setting = Setting(megabytes=megabytes, steps=steps, environment=environment)
        for number in range(num_lives):
            for place, (way, act) in enumerate(_WAYS.items()):
                before = _received(environment)
                machine = Path(name, str(number), str(place))
                seen[way].append(act(setting, machine, 2 + number % 3))
                sent[way] += _received(environment) - before
    bare = _median_step(seen[_ALONE])
    return [_row(way, seen[way], sent[way], megabytes, bare) for way in _WAYS]


def _received(environment: Mapping[str, str]) -> int:
    with urllib.request.urlopen(f"{environment['AWS_ENDPOINT_URL']}/-/received") as answer:
        return int(answer.read())


def _median_step(some: list[ScriptLife]) -> float:
    return statistics.median(second for life in some for second in life.steps)


def _row(
    way: str, some: list[ScriptLife], sent: int, megabytes: int, alone: float
) -> dict[str, Any]:
    step = _median_step(some)
    safe = [second for life in some for second in life.safe]
    # The pair with each checkpoint; the file that never changes once, on the first machine.
    changed = sum(len(life.written) for life in some) * 2 * megabytes + 2 * megabytes
    found = Counter(life.found for life in some[1:])
    is_alone = way == _ALONE
    behind = [
        before.written[-1][1] - after.restored
        for before, after in itertools.pairwise(some)
        if after.found == "whole"
    ]
    return {
        "way": way,
        "step, ms": 1000 * step,
        "% more": 100 * (step / alone - 1),
        "a save, s": statistics.median(second for life in some for second in life.saves),
        "to safe, s": statistics.median(safe) if safe else "-",
        "sent per changed MB": "-" if is_alone else sent / (changed * 2**20),
        "whole, torn, half, none": "-" if is_alone else ", ".join(str(found[f]) for f in _FOUND),
        "behind": statistics.median(behind) if behind and not is_alone else "-",
    }
