"""Images in shards: WebDataset's tar files, which other tools read too, and a random-access index.

Shard 3 holds pairs of members, 00003-00012.jpg and 00003-00012.cls; the index says where each
image's bytes are. A failed read is retried, and its bytes are never treated as an image.
"""

import io
import os
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import UserError

if TYPE_CHECKING:
    # It imports torch.
    from training import Dataset

# One row per image: its shard, the offset and length of its bytes there, and its class.
INDEX = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("label", "<u4")])
_READS = 3
_PAUSE_SECONDS = 0.2


def shard_name(split: str, number: int) -> str:
    """Return the file name of a split's shard."""
    return f"{split}-{number:05d}.tar"


def index_name(split: str) -> str:
    """Return the file name of a split's index."""
    return f"{split}.index.npy"


def write_shard(path: Path, shard: int, images: Sequence[tuple[bytes, int]]) -> NDArray[Any]:
    """Write JPEGs with their classes as one tar; return its rows of the index.

    The same images make the same bytes, because members have no time and no owner.
    """
    rows = np.zeros(len(images), INDEX)
    with (
        path.open("wb") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for place, (jpeg, label) in enumerate(images):
            name = _key(shard, place)
            _add(tar, f"{name}.jpg", jpeg)
            # The image, padded to a whole block, ends where the file ends now.
            offset = file.tell() - _padded(len(jpeg))
            rows[place] = (shard, offset, len(jpeg), label)
            _add(tar, f"{name}.cls", str(label).encode())
    return rows


def _key(shard: int, place: int) -> str:
    return f"{shard:05d}-{place:05d}"


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


class Shards:
    """A reader of one split's images by their number in the index.

    It keeps no file open, so threads and processes may share it: opening costs microseconds,
    decoding a thousand times as much.
    """

    def __init__(self, dataset: "Dataset", split: str) -> None:
        self.index = _read_index(dataset.file(index_name(split)), len(dataset.meta["classes"]))
        self._dataset = dataset
        self._split = split

    def __len__(self) -> int:
        return len(self.index)

    def read(self, number: int) -> bytes:
        """Return the JPEG of an image; failed reads are retried before they are an error.

        It waits for the shard while a sync is filling the dataset.
        """
        row = self.index[number]
        name = shard_name(self._split, int(row["shard"]))
        offset, length = int(row["offset"]), int(row["length"])
        for attempt in range(1, _READS + 1):
            try:
                return _read(self._dataset.file(name), offset, length)
            except OSError as error:
                if attempt == _READS:
                    why = error.strerror or str(error)
                    raise OSError(f"{self.describe(number)} cannot be read: {why}") from error
            time.sleep(_PAUSE_SECONDS * attempt)
        raise AssertionError("the last attempt returns or raises")

    def label(self, number: int) -> int:
        """Return the number of its class."""
        return int(self.index["label"][number])

    def describe(self, number: int) -> str:
        """Describe an image in messages by its name in its shard."""
        shard = int(self.index["shard"][number])
        place = number - int(np.searchsorted(self.index["shard"], shard))
        return f"{_key(shard, place)}.jpg of {shard_name(self._split, shard)}"

    def files(self, numbers: NDArray[np.int64]) -> list[str]:
        """Return the shards of these images, in the order in which they are first needed."""
        shards, first = np.unique(self.index["shard"][numbers], return_index=True)
        return [shard_name(self._split, int(shard)) for shard in shards[np.argsort(first)]]


def _read(path: Path, offset: int, length: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        content = os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)
    if len(content) != length:
        raise OSError(f"it ends {length - len(content)} bytes too early; sync the dataset again")
    return content


def _read_index(path: Path, num_classes: int) -> NDArray[Any]:
    """Read a split's index; UserError if the file is not an index."""
    try:
        index = np.load(path, allow_pickle=False)
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
    """Return all positions of `shards`: shards in random order, shuffled within `window` of them.

    An epoch thus reads each shard in one stretch of time, and a sync may fetch them in that order.
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
