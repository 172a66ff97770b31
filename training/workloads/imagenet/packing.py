"""Packs images into shards; an interrupted import continues where it stopped.

Each finished shard has its own record, which is written last; a shard without one is packed again,
to the same bytes. Imports no torch, for which every packing process would have to wait.

Converts a user's image file to the JPEG that is packed; other files are refused.

A JPEG in RGB or grey whose shorter side is not above the requested one keeps its bytes. Everything
else (PNG, WebP, CMYK, a JPEG that must shrink) is encoded again. As in torchvision's ImageFolder, a
picture's transparency and its EXIF orientation are not applied. Imports no torch.

Images in shards: WebDataset's tar files, which other tools read too, and a random-access index.

Shard 3 holds pairs of members, 00003-00012.jpg and 00003-00012.cls; the index says where each
image's bytes are. A failed read is retried, and its bytes are never treated as an image.
"""

import hashlib
import io
import json
import logging
import math
import os
import tarfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from contract.errors import UserError
from contract.file_names import HEIC
from contract.keys import PACKED, UNFINISHED
from training import check_fields, in_processes
from training.durable import Brought, FinishedFiles, LocalDataset, Output

if TYPE_CHECKING:
    # It imports torch.
    from training import Dataset, Progress


_log = logging.getLogger(__name__)

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


_PLAIN = ("RGB", "L")


class NoImageError(ValueError):
    """A file cannot be packed; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """Options for `data import --override name=value`; 0 pixels: images keep their size."""

    shorter_side: int = 0
    # For the JPEGs that are encoded again.
    quality: int = 90
    # More non-images than this share are not an accident.
    left_out_share: float = 0.01
    # The classes of validation files without class folders: a CSV, or ILSVRC2012's devkit.
    validation_classes: str = ""

    def __post_init__(self) -> None:
        check_fields(self, at_least={0: ("shorter_side",)}, below_1=("left_out_share",))
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality is {self.quality}; give 1 to 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A JPEG that is packed, its pixels, and whether it was encoded again."""

    jpeg: bytes
    num_pixels: int
    is_converted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BroughtImage:
    """A user's image, which is read and encoded by the process that packs it."""

    file: Brought
    label: int
    options: ImageOptions

    @property
    def name(self) -> str:
        return self.file.name

    def make(self) -> Encoded:
        """Read and encode it; if reading fails, that is the machine's fault, not the file's."""
        try:
            content = self.file.read()
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(
                f"{self.name} cannot be read: {why}; give the same command again once it can"
            ) from error
        return encode(content, self.options.shorter_side, self.options.quality)


def encode(content: bytes, shorter_side: int, quality: int) -> Encoded:
    """Encode an image file as JPEG; it is fully decoded, so no damaged one is packed."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of large but accepted sizes, and of broken metadata.
            warnings.simplefilter("ignore")
            return _encode(content, shorter_side, quality)
    except UnidentifiedImageError as error:
        if content[4:8] == b"ftyp" and content[8:12] in HEIC:
            raise NoImageError("is HEIC, Apple's format, which Pillow cannot read") from error
        # Pillow's own message has a memory address, but the list of rejects is part of the dataset.
        raise NoImageError("cannot identify the image file") from error
    except (MemoryError, NoImageError):
        raise  # the machine's fault, or already explained
    except Exception as error:  # each of Pillow's formats has its own errors
        raise NoImageError(f"cannot be decoded: {error or type(error).__name__}") from error


def _encode(content: bytes, shorter_side: int, quality: int) -> Encoded:
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        width, height = image.size
        is_large = 0 < shorter_side < min(width, height)
        if image.format == "JPEG" and image.mode in _PLAIN and not is_large:
            return Encoded(jpeg=content, num_pixels=width * height, is_converted=False)
        plain = _plain(image)
    if is_large:
        scale = shorter_side / min(width, height)
        width, height = (max(shorter_side, round(side * scale)) for side in (width, height))
        plain = plain.resize((width, height), Image.Resampling.LANCZOS)
    encoded = io.BytesIO()
    plain.save(encoded, "JPEG", quality=quality)
    return Encoded(jpeg=encoded.getvalue(), num_pixels=width * height, is_converted=True)


def _plain(image: Image.Image) -> Image.Image:
    if image.mode in _PLAIN:
        return image
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        # Pillow would treat every value above 255 as white.
        image = image.convert("I").point(lambda value: value / 256)
        return image.convert("L")
    if image.mode in ("I", "F"):
        raise NoImageError("has 32 bits a pixel, of which nobody knows what is white")
    if image.mode == "P":
        # A palette with transparency needs its own channel first.
        image = image.convert("RGBA")
    return image.convert("RGB")


_LEFT_OUT = "left_out.json"
_SOURCE = f"{PACKED}source.z"
_SHARD_BYTES = 128 << 20
# Enough for shuffling within a window of shards to mix, and for a sync to order them.
_MIN_SHARDS = 8
# Images whose encoded size decides how many fill a shard.
_TRIED = 64
_JUDGED_AFTER = 1000  # images: a few rejects are then all named, and many stop the import early
_REASONS = 3  # why files are left out: so many on the console, all in the list
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
    xxh128: str = ""  # empty in a record of an older version
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
    packed = _Packed(
        num_bytes=path.stat().st_size,
        **LocalDataset.checksums_of(path),
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
        first = {file["why"]: file["file"] for file in reversed(left_out)}
        counts = Counter(file["why"] for file in left_out).most_common(_REASONS)
        said = "; ".join(f"{num} {why}, such as {first[why]}" for why, num in counts)
        _log.warning("[data] left out, in %s: %s", _LEFT_OUT, said)
    else:
        output.delete([_LEFT_OUT])
    files = [
        _file(shard.name, one.num_bytes, one.sha256, one.xxh128)
        for shard, one in ((shard, packed[shard.name]) for shard in shards)
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


def _file(name: str, num_bytes: int, sha256: str, xxh128: str = "") -> Mapping[str, Any]:
    fast = {"xxh128": xxh128} if xxh128 else {}
    return {"name": name, "bytes": num_bytes, "sha256": sha256, **fast}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
