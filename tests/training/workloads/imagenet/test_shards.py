"""Shards are read at random, retried and never guessed; their order is a function of the seed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import UserError
from tests.training.workloads.imagenet.photographs import photograph
from training.workloads.imagenet import packing
from training.workloads.imagenet.packing import (
    INDEX,
    Shards,
    index_name,
    shard_name,
    shuffled_by_windows,
    write_shard,
)


class Folder:
    """A dataset of files that are there."""

    def __init__(self, folder: Path, num_classes: int) -> None:
        self.folder = folder
        self.meta: Mapping[str, Any] = {"classes": [str(n) for n in range(num_classes)]}
        self.asked: list[str] = []

    def file(self, name: str) -> Path:
        self.asked.append(name)
        return self.folder / name


@pytest.fixture
def dataset(tmp_path: Path) -> Folder:
    """Three shards of four images in four classes."""
    rows = []
    for shard in range(3):
        images = [(photograph(4 * shard + place), place) for place in range(4)]
        rows.append(write_shard(tmp_path / shard_name("train", shard), shard, images))
    np.save(tmp_path / index_name("train"), np.concatenate(rows))
    return Folder(tmp_path, 4)


def test_an_image_is_read_from_its_own_shard_alone(dataset: Folder) -> None:
    read = Shards(dataset, "train")  # type: ignore[arg-type]
    dataset.asked.clear()
    assert [read.read(number) for number in (11, 0)] == [photograph(11), photograph(0)]
    assert dataset.asked == ["train-00002.tar", "train-00000.tar"]
    assert (len(read), read.label(6)) == (12, 2)
    assert read.describe(6) == "00001-00002.jpg of train-00001.tar"


def test_files_are_named_in_the_order_in_which_they_are_needed_first(dataset: Folder) -> None:
    read = Shards(dataset, "train")  # type: ignore[arg-type]
    numbers = np.array([9, 1, 8, 2, 10])
    assert read.files(numbers) == ["train-00002.tar", "train-00000.tar"]
    assert read.files(numbers[:0]) == []


def test_a_read_that_fails_is_tried_again(dataset: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_PAUSE_SECONDS", 0.0)
    read, pread, failures = Shards(dataset, "train"), os.pread, [1, 2]  # type: ignore[arg-type]

    def fail_twice(descriptor: int, length: int, offset: int) -> bytes:
        if failures:
            if failures.pop() == 2:
                raise OSError(5, "Input/output error")
            return b"short"
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", fail_twice)
    assert read.read(5) == photograph(5)
    assert not failures


def test_fails_with_the_images_name_if_reads_keep_failing(
    dataset: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_PAUSE_SECONDS", 0.0)
    read = Shards(dataset, "train")  # type: ignore[arg-type]
    os.truncate(dataset.folder / "train-00002.tar", 1000)
    with pytest.raises(OSError, match=r"00002-00003\.jpg of train-00002\.tar cannot be read: it e"):
        read.read(11)


def test_no_file_stays_open(dataset: Folder) -> None:
    read = Shards(dataset, "train")  # type: ignore[arg-type]
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(12):
        read.read(number)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an index: "),
        (b"\x93NUMPY\x01", "is not an index: "),
        (np.zeros(3), "is not an index of images"),
        (np.zeros(0, INDEX), "is not an index of images"),
        (np.array([(0, 512, 9, 4)], INDEX), "has class 4, of 4 classes"),
    ],
)
def test_fails_for_what_is_no_index(dataset: Folder, content: Any, message: str) -> None:
    path = dataset.folder / index_name("train")
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(UserError, match=message):
        Shards(dataset, "train")  # type: ignore[arg-type]


def test_an_order_has_each_image_once_and_reads_a_window_of_shards_at_a_time() -> None:
    of_shard = np.repeat(np.arange(10), np.arange(10, 30, 2))
    order = shuffled_by_windows(of_shard, 3, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(len(of_shard)))
    read = of_shard[order]
    open_at_once = [
        len({shard for shard in range(10) if shard in read[:at] and shard in read[at:]})
        for at in range(len(read))
    ]
    assert max(open_at_once) == 3
    assert len(set(read[:12].tolist())) == 3, "a window is shuffled, not read shard by shard"


def test_an_order_is_a_function_of_its_seed_alone() -> None:
    of_shard = np.repeat(np.arange(8), 5)
    orders = [
        shuffled_by_windows(of_shard, 2, np.random.default_rng(seed)).tolist() for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
