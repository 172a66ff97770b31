"""One shard while it is packed, and the record of what is in it. Imports no torch."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from training.dataset_output import RECORDS, Output
from training.workloads.imagenet.images import Encoded, NoImageError
from training.workloads.imagenet.shards import INDEX, shard_name, write_shard

_COLUMNS = ("offset", "length", "label")


class Packable(Protocol):
    """An image that is made in the process which packs it."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def label(self) -> int:
        """The number of its class."""

    def make(self) -> Encoded:
        """The JPEG; NoImageError if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one process packs."""

    split: str
    number: int
    images: Sequence[Packable]

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    @property
    def record(self) -> str:
        """The name of its record while the dataset is unfinished."""
        return f"{RECORDS}{self.name}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A shard that is finished: its file, its rows of the index, and what became of its images."""

    num_bytes: int
    sha256: str
    rows: NDArray[Any]
    num_pixels: int
    num_converted: int
    left_out: Sequence[Mapping[str, str]]

    def to_json(self) -> bytes:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "rows"}
        rows = {name: self.rows[name].tolist() for name in _COLUMNS}
        return json.dumps({**values, "rows": rows}).encode()

    @classmethod
    def from_json(cls, content: bytes, number: int) -> "Packed":
        """The record of shard `number`."""
        values = json.loads(content)
        columns = values.pop("rows")
        rows = np.zeros(len(columns["label"]), INDEX)
        rows["shard"] = number
        for name in _COLUMNS:
            rows[name] = columns[name]
        return cls(rows=rows, **values)


def pack_shard(shard: Shard, output: Output, working: Path) -> Packed:
    """Write a shard and then its record, without which it counts as not packed."""
    images, left_out, num_pixels, num_converted = [], [], 0, 0
    for image in shard.images:
        try:
            made = image.make()
        except NoImageError as error:
            left_out.append({"file": image.name, "why": str(error)})
            continue
        images.append((made.jpeg, image.label))
        num_pixels += made.num_pixels
        num_converted += made.is_converted
    path = working / shard.name
    rows = write_shard(path, shard.number, images)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    packed = Packed(
        num_bytes=path.stat().st_size,
        sha256=sha256,
        rows=rows,
        num_pixels=num_pixels,
        num_converted=num_converted,
        left_out=left_out,
    )
    output.place(shard.name, path)
    output.write(shard.record, packed.to_json())
    return packed


def npy(array: NDArray[Any]) -> bytes:
    """The array as an .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
