"""A run of a program in a folder, and on both kinds of store."""

from pathlib import Path

import pytest

from tests.training.durable.program.programs import COUNTER, METRICS, ProgramRun


@pytest.fixture
def run(tmp_path: Path) -> ProgramRun:
    """A program that counts, kept in a folder."""
    found = ProgramRun(folder=tmp_path, uri=str(tmp_path / "runs" / "one"), options=[*METRICS])
    found.write(COUNTER)
    return found


@pytest.fixture
def run_anywhere(tmp_path: Path, store_uri: str) -> ProgramRun:
    """The same, in a folder and in S3."""
    found = ProgramRun(folder=tmp_path, uri=f"{store_uri}/runs/one", options=[*METRICS])
    found.write(COUNTER)
    return found
