"""Traces of the tests, made here in the format of the public ones, which are not shipped."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

WriteTrace = Callable[..., Path]


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """Write a trace file of some ticks."""

    def write(data: object, *, gap: object = 60, name: str = "trace.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"metadata": {"gap_seconds": gap}, "data": data}))
        return path

    return write
