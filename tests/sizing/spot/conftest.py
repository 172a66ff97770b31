"""Traces of the tests, made here in the format of the public ones, which are not shipped."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sizing.spot.traces import Life

WriteTrace = Callable[..., Path]


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """Write a trace file of some ticks."""

    def write(data: object, *, gap: object = 60, name: str = "trace.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"metadata": {"gap_seconds": gap}, "data": data}))
        return path

    return write


def poisson_lives(*, seed: int, mean: float, wait: float, total: float) -> list[Life]:
    """Lives and waits drawn from exponentials, up to `total` seconds."""
    luck, now, lives = random.Random(seed), 0.0, []
    while now < total:
        end = min(now + luck.expovariate(1 / mean), total)
        lives.append(Life(start=now, end=end))
        now = end + (luck.expovariate(1 / wait) if wait else 0.0)
    return lives
