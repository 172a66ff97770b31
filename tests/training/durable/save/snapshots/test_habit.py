"""The end of a save is known from those before it, and never in the middle of one."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from training.durable.save.snapshots.listing import list_folder
from training.durable.save.snapshots.quiet import GrowingFiles, Replacing, SaveHabit

# What a program writes between two pauses: paths, where `a -> b` is a link.
Pauses = Sequence[Sequence[str]]


def ends(folder: Path, pauses: Pauses) -> list[bool]:
    """Whether each pause is known to be the end of a save."""
    habit = SaveHabit()
    habit.begin(list_folder(folder))
    found = []
    for number, names in enumerate(pauses):
        for name in names:
            path, _, target = name.partition(" -> ")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if target:
                (folder / path).unlink(missing_ok=True)
                (folder / path).symlink_to(target)
            else:
                (folder / path).write_bytes(bytes(number + 1))
        found.append(habit.is_end(list_folder(folder)))
    return found


SHARDS = ["shard-1", "shard-2", "index.json"]


def rotating(number: int) -> list[str]:
    folder = f"checkpoint-{number}"
    return [*(f"{folder}/{name}" for name in SHARDS), f"latest -> {folder}"]


@pytest.mark.parametrize(
    "save",
    [
        lambda number: ["model.pt"],
        lambda number: SHARDS,
        lambda number: [f"epoch={number}-step={7 * number}.ckpt", "last.ckpt"],
        rotating,
    ],
)
def test_the_third_save_of_a_kind_is_known_by_its_end(
    tmp_path: Path, save: Callable[[int], list[str]]
) -> None:
    pauses = [save(number) for number in range(1, 6)]
    assert ends(tmp_path, pauses) == [False, False, True, True, True]


def test_what_is_written_once_at_the_start_does_not_count(tmp_path: Path) -> None:
    pauses = [["config.json"], ["model.pt"], ["model.pt"], ["model.pt"]]
    assert ends(tmp_path, pauses) == [False, False, False, True]
    pauses[0] = ["config.json", "model.pt"]
    (tmp_path / "other").mkdir()
    assert ends(tmp_path / "other", pauses) == [False, False, False, True]


@pytest.mark.parametrize(
    "pauses",
    [
        # The pause in the save is longer than the one after it, which is not seen.
        [["shard-1"], *[["shard-2", "index.json", "shard-1"]] * 9],
        [["config.json", "shard-1"], *[["shard-2", "index.json", "shard-1"]] * 9],
        [["shard-1"], ["shard-2", "index.json"]] * 9,
        [["model.pt"], ["optimizer.pt"]] * 9,
        [[f"checkpoint-{n // 3}/shard-{n % 3}"] for n in range(9)],
        [[f"step{10 + n // 9}-shard{n % 9}.pt", "state.json"] for n in range(9)],
        [[f"shard-{n}.pt"] for n in range(9)],
        # One that stalls once in its save stays unknown.
        [SHARDS, ["shard-1"], ["shard-2", "index.json"], *[SHARDS] * 9],
    ],
)
def test_a_pause_within_a_save_is_never_taken_for_its_end(tmp_path: Path, pauses: Pauses) -> None:
    assert not any(ends(tmp_path, pauses))


def test_a_part_of_a_save_is_known_from_all_of_it(tmp_path: Path) -> None:
    habit = SaveHabit()
    habit.begin(list_folder(tmp_path))
    found = []
    for number in range(1, 4):
        for name in SHARDS:
            (tmp_path / name).write_bytes(bytes(number))
            found.append(habit.is_part(list_folder(tmp_path)))
        habit.is_end(list_folder(tmp_path))
    assert found == [*[False] * 6, True, True, False]


def replaces(folder: Path, *acts: Callable[[], object]) -> bool:
    """Whether the habit is seen, of a program that does these one after the other."""
    found, before = Replacing(), list_folder(folder)
    for act in acts:
        act()
        now = list_folder(folder)
        found.look(before, now)
        before = now
    return found.is_habit


def test_a_program_that_replaces_whole_files_is_known_from_one_that_writes_into_them(
    tmp_path: Path,
) -> None:
    model, part = tmp_path / "model.pt", tmp_path / "model.pt.part"

    def rename() -> None:
        part.rename(model)

    def write() -> None:
        part.write_bytes(b"new")

    assert not replaces(tmp_path, write, rename), "nothing was replaced yet"
    assert replaces(tmp_path, write, rename, write, rename)
    assert not replaces(tmp_path, write, rename, lambda: model.write_bytes(b"own"))


class Growing:
    """A file that is looked at after each write."""

    def __init__(self, folder: Path, pause_seconds: float = 0.5) -> None:
        self.path = folder / "metrics.csv"
        self._folder = folder
        self._files = GrowingFiles(folder, 0.01, pause_seconds)

    def write(self, data: bytes, mode: str = "ab") -> bool:
        """Whether it is then known to be one that only grows."""
        with self.path.open(mode) as stream:
            stream.write(data)
        time.sleep(0.02)
        self._files.look(list_folder(self._folder))
        return self.path.name in self._files.logs


def test_a_text_that_only_grows_is_known_after_it_has_grown_three_times(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    assert [growing.write(b"1,0.5\n") for _ in range(5)] == [False, False, False, True, True]
    assert not growing.write(b"1,0.5\n", "wb"), "begun again, it may be a save"


@pytest.mark.parametrize("pause_seconds", [0.5, 0.001])
@pytest.mark.parametrize("data", [os.urandom(5000) + b"\5\n", b'{"weights": [0.5, 0.25, '])
def test_a_save_that_grows_while_it_is_written_is_none(
    tmp_path: Path, data: bytes, pause_seconds: float
) -> None:
    growing = Growing(tmp_path, pause_seconds)
    found = [growing.write(data) for _ in range(6)]
    assert not any(found)


def test_a_file_that_grows_and_is_changed_where_it_was_is_none(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    rows = [b"%d\n" % number for number in range(9)]
    texts = [b"[" + b",".join(rows[:number]) + b"]\n" for number in range(9)]
    found = [growing.write(text, "r+b" if at else "wb") for at, text in enumerate(texts)]
    assert not any(found)
