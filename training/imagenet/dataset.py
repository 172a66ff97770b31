"""Packs images that users bring into shards, in parallel; what is no image is left out and named.

Imports no torch: each process that packs would have to wait for it.
"""

import io
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from training.errors import UserError
from training.imagenet.shards import INDEX, index_name, shard_name, write_shard
from training.sources import SourceFile, class_names

if TYPE_CHECKING:
    # It imports torch.
    from training.workload import Progress

LEFT_OUT = "left_out.json"
_SHARD_BYTES = 128 << 20
# So that shuffling within some shards mixes, and a sync has something to order.
_MIN_SHARDS = 8
_VALIDATION_SHARE = 0.1
# More unreadable files than this are no accident.
_MAX_LEFT_OUT_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """`shorter_side` in pixels (0: as they are) and the JPEG `quality` of what is encoded anew."""

    shorter_side: int = 0
    quality: int = 92

    def __post_init__(self) -> None:
        if self.shorter_side < 0:
            raise ValueError(f"shorter_side is {self.shorter_side}; give 0 or more pixels")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality is {self.quality}; give 1 to 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """An image that is made in the process which packs it."""

    name: str
    label: int
    make: Callable[[], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    """What one process packs."""

    out: Path
    split: str
    number: int
    first: int  # the number of its first image within the split
    images: Sequence[Drawn]


def import_dataset(
    files: Sequence[SourceFile],
    out: Path,
    seed: int,
    progress: "Progress",
    options: ImageOptions | None = None,
) -> Mapping[str, Any]:
    """Pack the images of `files` into the folder `out`; return the meta.

    Without splits of their own, a tenth of each class is for validation; `seed` decides which.
    """
    classes = class_names(files)
    chosen = options or ImageOptions()
    labels = {name: number for number, name in enumerate(classes)}
    splits: dict[str, list[Drawn]] = {}
    for file, split in zip(files, _splits(files, seed), strict=True):
        make = Encoded(path=file.path, options=chosen)
        drawn = Drawn(name=file.name, label=labels[file.label], make=make)
        splits.setdefault(split, []).append(drawn)
    if missing := [split for split in ("train", "validation") if split not in splits]:
        raise UserError(f"no file is in split {missing[0]}; give it some, or give no splits")
    sizes = sum(file.path.stat().st_size for file in files)
    return pack(splits, classes, out, seed, progress, image_bytes=sizes / len(files))


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The JPEG of a file: its own bytes if they are one in RGB or grey and of a wanted size."""

    path: Path
    options: ImageOptions

    def __call__(self) -> bytes:
        """Decode the whole image, so that no damaged one is packed."""
        content = self.path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            side = self.options.shorter_side
            if (
                image.format == "JPEG"
                and image.mode in ("RGB", "L")
                and not 0 < side < min(image.size)
            ):
                return content
            rgb = image.convert("RGB")
            if 0 < side < min(rgb.size):
                scale = side / min(rgb.size)
                size = (max(side, round(rgb.width * scale)), max(side, round(rgb.height * scale)))
                rgb = rgb.resize(size, Image.Resampling.LANCZOS)
            encoded = io.BytesIO()
            rgb.save(encoded, "JPEG", quality=self.options.quality)
            return encoded.getvalue()


def pack(
    splits: Mapping[str, Sequence[Drawn]],
    classes: Sequence[str],
    out: Path,
    seed: int,
    progress: "Progress",
    *,
    image_bytes: float,
) -> Mapping[str, Any]:
    """Write every split's shards and index into `out`; return the meta."""
    shards = [
        shard
        for split, images in sorted(splits.items())
        for shard in _shards(out, split, images, seed, image_bytes)
    ]
    total, done = sum(map(len, splits.values())), 0
    rows: dict[str, list[NDArray[Any]]] = {split: [] for split in splits}
    left_out: list[str] = []
    for shard, (written, refused) in zip(shards, _in_processes(_pack, shards), strict=True):
        rows[shard.split].append(written)
        left_out += refused
        done += len(shard.images)
        progress(done, total)
        if len(left_out) > max(1, _MAX_LEFT_OUT_SHARE * total):
            raise UserError(
                f"{len(left_out)} of {total} files are no images; the first: {left_out[0]}"
            )
    for split, found in rows.items():
        np.save(out / index_name(split), np.concatenate(found))
    if left_out:
        (out / LEFT_OUT).write_text(json.dumps(left_out, indent=1) + "\n", encoding="utf-8")
    counts = {split: int(sum(map(len, found))) for split, found in rows.items()}
    return {"classes": list(classes), "splits": counts, "left_out": len(left_out)}


def _shards(
    out: Path, split: str, images: Sequence[Drawn], seed: int, image_bytes: float
) -> Iterator[_Shard]:
    """Divide a split's images, in random order, so that each shard is like the whole."""
    salt = int.from_bytes(split.encode(), "little")
    order = np.random.default_rng([seed, salt]).permutation(len(images))
    each = min(max(1, int(_SHARD_BYTES / image_bytes)), -(-len(images) // _MIN_SHARDS))
    for number, first in enumerate(range(0, len(images), each)):
        chosen = [images[place] for place in order[first : first + each]]
        yield _Shard(out=out, split=split, number=number, first=first, images=chosen)


def _pack(shard: _Shard) -> tuple[NDArray[Any], list[str]]:
    """Write one shard; return its rows of the index, and what was left out and why."""
    images, left_out = [], []
    for image in shard.images:
        try:
            images.append((image.make(), image.label))
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
            left_out.append(f"{image.name}: {error}")
    path = shard.out / shard_name(shard.split, shard.number)
    rows = write_shard(path, shard.first, images) if images else np.zeros(0, INDEX)
    rows["shard"] = shard.number
    return rows, left_out


def _in_processes(
    act: Callable[[_Shard], tuple[NDArray[Any], list[str]]], shards: Sequence[_Shard]
) -> Iterable[tuple[NDArray[Any], list[str]]]:
    num = min(os.cpu_count() or 1, len(shards))
    if num == 1:
        yield from map(act, shards)
        return
    # spawn: a fork is unsafe if the caller has threads (torch).
    context = multiprocessing.get_context("spawn")
    with context.Pool(num, initializer=_leave_interrupts_to_the_parent) as pool:
        yield from pool.imap(act, shards)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _splits(files: Sequence[SourceFile], seed: int) -> Sequence[str]:
    if files[0].split is not None:
        return [str(file.split) for file in files]
    chosen = ["train"] * len(files)
    of_class: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        of_class.setdefault(file.label, []).append(number)
    for place, (label, numbers) in enumerate(sorted(of_class.items())):
        if len(numbers) < 2:
            raise UserError(f"class {label!r} has a single image; give two or more")
        held_out = max(1, round(_VALIDATION_SHARE * len(numbers)))
        for number in np.random.default_rng([seed, place]).permutation(numbers)[:held_out]:
            chosen[int(number)] = "validation"
    return chosen
