"""Alternates the four ways over many lost machines: steps, safety, bytes, and what is restored."""

import itertools
import statistics
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.program import lives
from benchmarks.program.lives import Life, Setting

_WAYS: Mapping[str, Callable[[Setting, Path, int], Life]] = {
    "the script alone": lives.alone,
    "aws s3 sync in a loop": lives.synced,
    "ours, script unchanged": lives.mirrored,
    "ours, with commit()": lives.committed,
}
# What a lost machine's successor may find.
_FOUND = ("whole", "torn pair", "half a file", "nothing")
_ALONE = next(iter(_WAYS))


def measure(*, num_lives: int, megabytes: int, steps: int) -> list[dict[str, Any]]:
    """Return a row for each way; a life ends by SIGKILL after 2 to 4 checkpoints."""
    if num_lives < 2 or megabytes < 1 or steps < 1:
        raise ValueError(
            f"give at least 2 lives, 1 megabyte and 1 step, got {num_lives}, {megabytes}, {steps}"
        )
    bucket = "benchmark"
    seen: dict[str, list[Life]] = {way: [] for way in _WAYS}
    sent = dict.fromkeys(_WAYS, 0)
    with tempfile.TemporaryDirectory() as name, lives.open_s3(bucket) as environment:
        setting = Setting(megabytes=megabytes, steps=steps, bucket=bucket, environment=environment)
        for number in range(num_lives):
            for way, live in _WAYS.items():
                before = _received(environment)
                machine = Path(name, str(number), live.__name__)
                seen[way].append(live(setting, machine, 2 + number % 3))
                sent[way] += _received(environment) - before
    alone = _median_step(seen[_ALONE])
    return [_row(way, seen[way], sent[way], megabytes, alone) for way in _WAYS]


def _received(environment: Mapping[str, str]) -> int:
    with urllib.request.urlopen(f"{environment['AWS_ENDPOINT_URL']}/-/received") as answer:
        return int(answer.read())


def _median_step(some: list[Life]) -> float:
    return statistics.median(second for life in some for second in life.steps)


def _row(way: str, some: list[Life], sent: int, megabytes: int, alone: float) -> dict[str, Any]:
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
