"""Packs images into shards; an interrupted import continues where it stopped.

Each finished shard has its own record, which is written last; a shard without one is packed again,
to the same bytes. Imports no torch, for which every packing process would have to wait.
"""

import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from contract.errors import UserError
from contract.keys import PACKED, UNFINISHED
from training import in_processes
from training.durable import FinishedFiles, Output
from training.workloads.imagenet.images import Encoded, NoImageError
from training.workloads.imagenet.shards import INDEX, index_name, shard_name, write_shard

if TYPE_CHECKING:
    # It imports torch.
    from training import Progress

_LEFT_OUT = "left_out.json"
_SOURCE = f"{PACKED}source.z"
_SHARD_BYTES = 128 << 20
# Enough for shuffling within a window of shards to mix, and for a sync to order them.
_MIN_SHARDS = 8
# Images whose encoded size decides how many fill a shard.
_TRIED = 64
_JUDGED_AFTER = 1000  # images: a few rejects are then all named, and many stop the import early
_COLUMNS = ("offset", "length", "label")


class _Packable(Protocol):
    """An image that is made by the process that packs it."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def label(self) -> int:
        """The number of its class."""

    def make(self) -> Encoded:
        """Return the JPEG; NoImageError if it is not an image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    """The unit of work of one process."""

    split: str
    number: int
    images: Sequence[_Packable]

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    @property
    def record(self) -> str:
        """The name of its record while the dataset is unfinished."""
        return f"{PACKED}{self.name}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """A finished shard: its file, its rows of the index, and the outcome of its images."""

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
    def from_json(cls, content: bytes, number: int) -> "_Packed":
        """Read the record of shard `number`."""
        values = json.loads(content)
        columns = values.pop("rows")
        rows = np.zeros(len(columns["label"]), INDEX)
        rows["shard"] = number
        for name in _COLUMNS:
            rows[name] = columns[name]
        return cls(rows=rows, **values)


def _pack_shard(shard: _Shard, output: Output, working: Path) -> _Packed:
    """Write a shard and then its record, without which it counts as unpacked."""
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
    packed = _Packed(
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


def _npy(array: NDArray[Any]) -> bytes:
    """Return the array as an .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Everything that is packed; changing any of it makes another dataset."""

    splits: Mapping[str, Sequence[_Packable]]
    classes: Sequence[str]
    seed: int
    options: Mapping[str, Any]
    # One line per file, in a fixed order.
    source: Sequence[str]
    left_out_share: float = 0.0


def pack(packing: Packing, output: Output, progress: "Progress") -> FinishedFiles:
    """Write every split's shards and index."""
    images_each = _begin(packing, output)
    with output.working_folder() as working:
        shards = [
            shard
            for split, images in sorted(packing.splits.items())
            for shard in _shards(split, images, packing.seed, images_each)
        ]
        packed = _packed_before(shards, output)
        total = sum(map(len, packing.splits.values()))
        done = sum(len(shard.images) for shard in shards if shard.name in packed)
        progress(done, total)
        _check_left_out(packed, total, packing, output)
        missing = [shard for shard in shards if shard.name not in packed]
        act = partial(_pack_shard, output=output, working=working)
        for shard, result in in_processes(act, missing):
            packed[shard.name] = result
            done += len(shard.images)
            progress(done, total)
            _check_left_out(packed, total, packing, output)
        return _finish(packing, shards, packed, output)


def _begin(packing: Packing, output: Output) -> int:
    """Return the number of images per shard; UserError if another import was begun here."""
    # File names may be invalid UTF-8.
    source = "\n".join(packing.source).encode(errors="surrogateescape")
    identity = {
        "seed": packing.seed,
        **packing.options,
        "source": hashlib.sha256(source).hexdigest(),
    }
    found = output.read(UNFINISHED)
    if found is not None:
        kept = json.loads(found)
        _check_same(kept["identity"], identity, packing, output)
        return int(kept["images_each"])
    images_each = _images_each(packing)
    begun = {"workload": "imagenet", "identity": identity, "images_each": images_each}
    # Written first, so that after a kill the same command may continue with the folder.
    output.write(UNFINISHED, json.dumps(begun).encode())
    output.write(_SOURCE, zlib.compress(source))
    return images_each


def _check_same(
    kept: Mapping[str, Any], now: Mapping[str, Any], packing: Packing, output: Output
) -> None:
    where = f"{output.where} has an unfinished dataset"
    for name in now:
        if name != "source" and kept.get(name) != now[name]:
            raise UserError(
                f"{where} with {name} {kept.get(name)!r}, not {now[name]!r}; continue with that, "
                "or give a new folder"
            )
    if kept["source"] != now["source"]:
        before = output.read(_SOURCE)
        listed = packing.source
        if before:
            listed = zlib.decompress(before).decode(errors="surrogateescape").split("\n")
        changed = sorted(set(listed) ^ set(packing.source))
        which = f": {changed[0]!r} is not in both (bytes, class, split, name)" if changed else ""
        raise UserError(f"{where} of other files{which}; restore the files, or give a new folder")


def _images_each(packing: Packing) -> int:
    """Return how many images fill a shard, from the sizes of a sample that the seed chooses."""
    images = [image for split in sorted(packing.splits) for image in packing.splits[split]]
    chosen = np.random.default_rng([packing.seed, _TRIED]).permutation(len(images))[:_TRIED]
    sizes = []
    for place in chosen:
        try:
            sizes.append(len(images[place].make().jpeg))
        except NoImageError:
            continue  # reported by the process that packs it
    return max(1, int(_SHARD_BYTES / max(1.0, float(np.mean(sizes or [_SHARD_BYTES])))))


def _shards(split: str, images: Sequence[_Packable], seed: int, each: int) -> Iterator[_Shard]:
    """Divide a split's images, in random order, so that each shard resembles the entire split."""
    salt = int.from_bytes(split.encode(), "little")
    order = np.random.default_rng([seed, salt]).permutation(len(images))
    each = min(each, -(-len(images) // _MIN_SHARDS))
    for number, first in enumerate(range(0, len(images), each)):
        chosen = [images[place] for place in order[first : first + each]]
        yield _Shard(split=split, number=number, images=chosen)


def _packed_before(shards: Sequence[_Shard], output: Output) -> dict[str, _Packed]:
    """Return the records of the shards that exist."""
    there, found = output.sizes(), dict[str, _Packed]()
    for shard in shards:
        content = output.read(shard.record) if shard.record in there else None
        if content is not None:
            packed = _Packed.from_json(content, shard.number)
            if there.get(shard.name) == packed.num_bytes:
                found[shard.name] = packed
    return found


def _check_left_out(
    packed: Mapping[str, _Packed], total: int, packing: Packing, output: Output
) -> None:
    left_out = [file for each in packed.values() for file in each.left_out]
    if len(left_out) <= max(1, packing.left_out_share * total):
        return
    done = len(left_out) + sum(len(each.rows) for each in packed.values())
    if done < min(total, _JUDGED_AFTER):
        return
    # Shards are in random order; while some are missing, the share gets a margin for chance.
    share = len(left_out) / done * (1.0 if done == total else 2.0)
    output.write(_LEFT_OUT, _json(left_out))
    advice = "Give images that Pillow can read"
    if len(left_out) < done:
        allowed = min(0.99, math.ceil(100 * share) / 100)
        advice = f"Remove them, or allow more with --override left_out_share={allowed:g}"
    raise UserError(
        f"{len(left_out)} of {done} files are not images, such as {left_out[0]['file']} "
        f"({left_out[0]['why']}); {output.where}/{_LEFT_OUT} names them. {advice}"
    )


def _finish(
    packing: Packing, shards: Sequence[_Shard], packed: Mapping[str, _Packed], output: Output
) -> FinishedFiles:
    """Write the other files of the dataset; return all files and the meta."""
    other_files, splits = dict[str, bytes](), dict[str, int]()
    for split in packing.splits:
        rows = [packed[shard.name].rows for shard in shards if shard.split == split]
        splits[split] = sum(map(len, rows))
        if not splits[split]:
            raise UserError(f"split {split} has no images; add some")
        other_files[index_name(split)] = _npy(np.concatenate(rows))
    left_out = [file for shard in shards for file in packed[shard.name].left_out]
    if left_out:
        other_files[_LEFT_OUT] = _json(left_out)
    else:
        output.delete([_LEFT_OUT])
    files = [
        _file(shard.name, packed[shard.name].num_bytes, packed[shard.name].sha256)
        for shard in shards
    ]
    for name, content in other_files.items():
        output.write(name, content)
        files.append(_file(name, len(content), hashlib.sha256(content).hexdigest()))
    num, each = sum(splits.values()), packed.values()
    meta = {
        "classes": list(packing.classes),
        "splits": splits,
        **packing.options,
        "seed": packing.seed,
        # Means, for sizing.
        "image_bytes": round(sum(int(one.rows["length"].sum()) for one in each) / num),
        "image_pixels": round(sum(one.num_pixels for one in each) / num),
        "converted": sum(one.num_converted for one in each),
        "left_out": len(left_out),
    }
    return FinishedFiles(meta=meta, files=sorted(files, key=lambda file: str(file["name"])))


def _file(name: str, num_bytes: int, sha256: str) -> Mapping[str, Any]:
    return {"name": name, "bytes": num_bytes, "sha256": sha256}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
