"""The end of a save is known from those before it, and never in the middle of one."""

import os
import re
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from training.durable.save.snapshots.listing import list_folder
from training.durable.save.snapshots.quiet import GrowingFiles, QuietTime, Replacing, SaveHabit

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


# What a program does between two looks: `>a` writes a file, `+a` adds to it, `-a` deletes it,
# `a>b` renames it and `a=b` gives it a second name.
@pytest.mark.parametrize(
    ("acts", "in_place"),
    [
        pytest.param([">s", ">t", "t>s"], [], id="replaced"),
        pytest.param([">s", ">t", "t>s", ">c1", "+c1"], ["c1"], id="a new file beside it"),
        pytest.param([">s", ">t", "t>s", "+s"], ["s"], id="written into as well"),
        pytest.param([">t", "+t", "t>s", ">t", "+t"], [], id="half of what is renamed"),
        pytest.param([">s", "", "s>old", ">s", "+s"], ["old", "s"], id="renamed to keep it"),
        pytest.param([">s", "", "-s", ">s", "+s"], ["s"], id="deleted and written anew"),
        pytest.param([">s", ">t", "t>s", "s=s1"], [], id="a second name of a replaced one"),
        pytest.param([">s", ">u", "u>s", ">t", "-t", ">t", "+t"], [], id="gone at the next look"),
        pytest.param([">c1", ">c2", "-c1", ">c3"], ["c2", "c3"], id="the next of a kind"),
        pytest.param([">t1", "+t1", "t1>s1", ">t2", "+t2"], [], id="numbered"),
        pytest.param([">t", "t>m", ">u", "u>o"], ["m", "o"], id="two of one save"),
        pytest.param(
            [">t", "t>m", ">u", "u>o", ">t", "t>m", ">u"], ["m", "o", "u"], id="between two renames"
        ),
        pytest.param(
            [">t", "t>m1", ">t", "t>m2", ">u", "u>o1"], ["m1", "m2", "o1"], id="numbered sets"
        ),
    ],
)
def test_a_replaced_file_vouches_for_itself_and_no_other(
    tmp_path: Path,
    acts: Sequence[str],
    in_place: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("training.durable.save.snapshots.quiet._RESTED_NS", 1_000_000)
    found, before = Replacing(tmp_path), list_folder(tmp_path)
    for act in acts:
        name, sign, other = re.fullmatch(r"(\w*)([>+=-]?)(\w*)", act).groups()  # type: ignore[union-attr]
        if name:
            act_on = os.rename if sign == ">" else os.link
            act_on(tmp_path / name, tmp_path / other)
        elif sign == "-":
            # On ext4 the next file would have its inode.
            (tmp_path / other).rename(tmp_path.with_name("deleted"))
        elif sign:
            with (tmp_path / other).open("wb" if sign == ">" else "ab") as stream:
                stream.write(b"half of it")
        now = list_folder(tmp_path)
        found.look(before, now)
        before = now
        time.sleep(0.01)
    assert [*found.in_place(before).files] == in_place


def test_a_database_is_whole_at_any_time(tmp_path: Path) -> None:
    found, path = Replacing(tmp_path), tmp_path / "study.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as base:
        base.execute("PRAGMA journal_mode=WAL")
        before = list_folder(tmp_path)
        base.execute("CREATE TABLE t (n)")
        base.execute("PRAGMA wal_checkpoint")
        now = list_folder(tmp_path)
        found.look(before, now)
        assert len(now.files) == 3
        assert not found.in_place(now).files


@pytest.mark.parametrize(
    ("gaps", "usual"),
    [
        pytest.param([4.0], None, id="one is not known to be usual"),
        pytest.param([3.0, 6.0, 3.0], 6.0, id="a pause within a save is shorter"),
        pytest.param([4.0, 4.0, 60.0, *[4.0] * 5], 4.0, id="one evaluation is an exception"),
    ],
)
def test_the_usual_time_between_two_saves_is_the_longest_of_many(
    gaps: Sequence[float], usual: float | None
) -> None:
    assert QuietTime(gaps=deque(gaps)).usual_gap == usual


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
        return self.path.name in self.look()

    def look(self) -> frozenset[str]:
        """The files that are then known to only grow."""
        time.sleep(0.02)
        self._files.look(list_folder(self._folder))
        assert self._files.logs is not None
        return self._files.logs


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


@pytest.mark.parametrize(
    ("size", "saves", "head", "is_known"),
    [
        pytest.param(9000, 3, b"", True, id="a larger file is saved twice"),
        pytest.param(100, 3, b"", False, id="smaller ones are no saves"),
        pytest.param(9000, 1, b"", False, id="once is what comes first in a save"),
        pytest.param(9000, 3, b"12", False, id="its head counts, as a database's"),
    ],
)
def test_a_stream_that_is_no_text_is_known_from_the_saves_beside_it(
    tmp_path: Path, size: int, saves: int, head: bytes, is_known: bool
) -> None:
    growing, stream = Growing(tmp_path, 0.001), tmp_path / "run.wandb"
    stream.write_bytes(b"00" + bytes(100))
    growing.look()
    for number in range(5):
        with stream.open("r+b") as file:
            file.write(head and b"%02d" % number)
            file.seek(0, os.SEEK_END)
            file.write(bytes([1]) * 50)
        if number in range(1, saves + 1):
            (tmp_path / "model.pt").write_bytes(bytes([number]) * size)
        found = growing.look()
    assert (stream.name in found) is is_known


def test_a_save_that_took_long_is_no_stream_however_often_a_larger_one_follows(
    tmp_path: Path,
) -> None:
    growing, best = Growing(tmp_path, 0.001), tmp_path / "best.pt"
    for _ in range(5):
        with best.open("ab") as file:
            file.write(bytes([1]) * 50)
        assert not growing.look()
    for number in range(3):
        (tmp_path / "model.pt").write_bytes(bytes([number]) * 9000)
        assert not growing.look()
