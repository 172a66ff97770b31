"""Images in shards: WebDataset's tar files, which others read too, and an index for random access.

A shard holds pairs of members, 00000012.jpg and 00000012.cls; the index says where each image's
bytes are. Reads are retried; what was read wrong is never taken for an image.
"""

import io
import os
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.errors import UserError

# One row an image: its shard, where its bytes begin there, how many they are, and its class.
INDEX = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("label", "<u4")])
_READS = 3
_PAUSE_SECONDS = 0.2


def shard_name(split: str, number: int) -> str:
    """The file of a split's shard."""
    return f"{split}-{number:06d}.tar"


def index_name(split: str) -> str:
    """The file of a split's index."""
    return f"{split}.index.npy"


def write_shard(path: Path, first: int, images: Sequence[tuple[bytes, int]]) -> NDArray[Any]:
    """Write JPEGs with their classes as one tar; return its rows of the index, of shard 0.

    The same images give the same bytes: members have no time and no owner.
    """
    rows = np.zeros(len(images), INDEX)
    with (
        path.open("wb") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for place, (jpeg, label) in enumerate(images):
            name = f"{first + place:08d}"
            _add(tar, f"{name}.jpg", jpeg)
            # A member's bytes follow its header of 512.
            end = file.tell() - _padded(len(jpeg))
            rows[place] = (0, end, len(jpeg), label)
            _add(tar, f"{name}.cls", str(label).encode())
    return rows


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


class ShardReader:
    """Reads images of one split by their number in the index; each process opens its own files."""

    def __init__(self, open_file: Callable[[str], Path], split: str, index: NDArray[Any]) -> None:
        self._open_file = open_file
        self._split = split
        self._index = index
        self._descriptors: dict[int, int] = {}

    def read(self, number: int) -> bytes:
        """The JPEG of an image; what fails is tried again, and then an error."""
        row = self._index[number]
        shard, offset, length = int(row["shard"]), int(row["offset"]), int(row["length"])
        for attempt in range(1, _READS + 1):
            try:
                content = os.pread(self._descriptor(shard), length, offset)
            except OSError:
                if attempt == _READS:
                    raise
                self._close(shard)
            else:
                if len(content) == length:
                    return content
                if attempt == _READS:
                    name = shard_name(self._split, shard)
                    raise OSError(f"{name} ends within image {number}; verify the dataset")
            time.sleep(_PAUSE_SECONDS * attempt)
        raise AssertionError("unreachable")

    def _descriptor(self, shard: int) -> int:
        if shard not in self._descriptors:
            path = self._open_file(shard_name(self._split, shard))
            self._descriptors[shard] = os.open(path, os.O_RDONLY)
        return self._descriptors[shard]

    def _close(self, shard: int) -> None:
        os.close(self._descriptors.pop(shard))


def read_index(path: Path, num_classes: int) -> NDArray[Any]:
    """A split's index, memory mapped; UserError if the file is not one."""
    try:
        index = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path.name} is not an index: {error}; import the images again") from error
    if index.dtype != INDEX or index.ndim != 1 or not len(index):
        raise UserError(f"{path.name} is not an index of images; import the images again")
    if int(index["label"].max()) >= num_classes:
        raise UserError(
            f"{path.name} has class {int(index['label'].max())}, of {num_classes} classes; "
            "import the images again"
        )
    return index  # type: ignore[no-any-return]


def shuffled_by_windows(
    shards: NDArray[Any], window: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Every position of `shards` once: shards in random order, shuffled within `window` of them.

    So an epoch reads each shard in one stretch of time, and a sync may fetch them in that order.
    """
    by_shard = np.argsort(shards, kind="stable")
    starts = np.flatnonzero(np.diff(shards[by_shard], prepend=-1))
    groups = np.split(by_shard, starts[1:])
    chosen = generator.permutation(len(groups))
    order: list[NDArray[Any]] = []
    for first in range(0, len(chosen), window):
        mixed = np.concatenate([groups[number] for number in chosen[first : first + window]])
        order.append(generator.permutation(mixed))
    return np.concatenate(order).astype(np.int64)
