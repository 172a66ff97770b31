"""Traces of the tests, made here in the format of the public ones, which are not shipped."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sizing.spot.pattern import Pattern

WriteTrace = Callable[..., Path]
# Lives and waits without a memory, and nothing unknown.
POISSON = Pattern(
    life_shape=1.0, wait_shape=1.0, rate_spread=0.0, wait_spread=0.0, starts_anywhen=False
)


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """Write a trace file of some ticks."""

    def write(data: object, *, gap: object = 60) -> Path:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"metadata": {"gap_seconds": gap}, "data": data}))
        return path

    return write
