"""Files with holes, as databases and memory maps make them: only their data is sent and written."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

_BLOCK_BYTES = 512  # of st_blocks
# With more, the list would cost more than the holes.
_MOST_EXTENTS = 1000
_READ_BYTES = 4 * 1024 * 1024


class Extents(tuple[tuple[int, int], ...]):
    """(start, bytes) of what holds data, in order, and last (size, 0): where the file ends."""

    __slots__ = ()

    @classmethod
    def of(cls, path: Path, size: int) -> Self | None:
        """Where the first `size` bytes of a file hold data; None where that is all of it."""
        try:
            if path.stat().st_blocks * _BLOCK_BYTES >= size:
                return None
            with path.open("rb") as stream:
                found = tuple(_extents(stream.fileno(), size))
        except OSError:
            return None  # whoever reads it says why it cannot be read
        is_dense = sum(count for _, count in found) == size
        return None if is_dense or len(found) > _MOST_EXTENTS else cls((*found, (size, 0)))

    @property
    def data_bytes(self) -> int:
        """Bytes of the data."""
        return sum(count for _, count in self)

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Of the data from byte `start` to `stop`: where in the file, from and to where in it."""
        first = 0
        for at, count in self:
            begin, end = max(start, first), min(stop, first + count)
            if begin < end:
                yield at + begin - first, begin, end
            first += count

    def refuse_wrong(self, size: int) -> None:
        """Raise ValueError if they are not those of `size` bytes of data."""
        end = 0
        for start, count in self:
            if start < end or count < 0:
                raise ValueError("the extents overlap")
            end = start + count
        if not self or self[-1][1] or self.data_bytes != size:
            raise ValueError("the extents are not those of the data")


def _extents(file: int, size: int) -> Iterator[tuple[int, int]]:
    end = 0
    while end < size:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # no data behind it
            return
        end = os.lseek(file, start, os.SEEK_HOLE)
        if start < size:
            yield start, min(end, size) - start


def data_of(path: Path, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The data of an open file with their places, to its end if it has no holes."""
    size = os.fstat(stream.fileno()).st_size
    for start, count in Extents.of(path, size) or ((0, sys.maxsize),):
        at = stream.seek(start)
        while data := stream.read(min(_READ_BYTES, start + count - at)):
            yield at, data
            at += len(data)
        if not count:
            yield at, b""  # a hole before its end
