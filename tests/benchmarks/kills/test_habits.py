"""A habit's restore sees what is torn and what is of two saves, when that is planted."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kills.programs import habits
from benchmarks.kills.programs.habits import HABITS, TornError

# The habits keep files open on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
VALUE = bytes(range(32))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(habits, "PIECE_SECONDS", 0.0)


def saved(name: str, folder: Path, *steps: int) -> Path:
    """A folder as the habit leaves it after saves at these steps."""
    folder.mkdir()
    habit = HABITS[name](folder)
    for step in steps:
        if name == "log":
            for number in range(1, step + 1):
                habit.stepped(number)
        habit.save(step, VALUE)
        while not habit.finished():
            pass
    if name == "sqlite":
        habit.base.close()
    return folder


def loaded(name: str, folder: Path) -> set[int]:
    found: list[tuple[int, Any]] = HABITS[name](folder).load()
    return {step for step, _ in found}


@pytest.mark.parametrize("name", HABITS)
def test_what_was_saved_last_is_restored(name: str, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert loaded(name, tmp_path / "new") == set()
    assert loaded(name, saved(name, tmp_path / "one", 40, 80)) == {80}


@pytest.mark.parametrize("name", HABITS)
def test_a_torn_file_is_seen(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "one", 40)
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 4 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 4)
    path.write_bytes(data)
    with pytest.raises(TornError):
        loaded(name, folder)


@pytest.mark.parametrize("name", ["in-place", "child", "small-files", "shards", "rotating"])
def test_files_of_two_saves_are_seen(name: str, tmp_path: Path) -> None:
    one, two = saved(name, tmp_path / "one", 40), saved(name, tmp_path / "two", 80)
    ours, theirs = (sorted(p for p in f.rglob("*.bin") if p.is_file()) for f in (one, two))
    shutil.copy(theirs[0], ours[0])
    assert loaded(name, one) == {40, 80}


def test_half_of_a_mapped_save_is_seen(tmp_path: Path) -> None:
    one, two = saved("mapped", tmp_path / "one", 40), saved("mapped", tmp_path / "two", 80)
    first, second = ((f / "state.map").read_bytes() for f in (one, two))
    (one / "state.map").write_bytes(first[: len(first) // 2] + second[len(first) // 2 :])
    assert loaded("mapped", one) == {40, 80}


def test_a_log_that_lacks_lines_of_the_state_is_seen(tmp_path: Path) -> None:
    folder = saved("log", tmp_path / "one", 3)
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:-1]))
    assert len(loaded("log", folder)) == 2
