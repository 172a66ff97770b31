"""The trajectory dataset on disk: clips.u8 and tracks.f32 (memory mapped) and labels.json.

Making it is parallel but not resumable, as it takes seconds. Opening it refuses files that do not
fit each other. The caller writes the manifest with the checksums.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from training.errors import UserError
from training.workloads.trajectory.clips import (
    CLIP_BYTES,
    CLIP_SHAPE,
    TRACK_BYTES,
    TRACK_SHAPE,
    Float32s,
    Frames,
    clip_label,
    render_clip,
)
from training.workloads.trajectory.paths import CLASSES

if TYPE_CHECKING:
    # It imports torch, for which each process that renders clips would have to wait.
    from training.workload import Progress

CLIPS_FILE = "clips.u8"
TRACKS_FILE = "tracks.f32"
LABELS_FILE = "labels.json"
# Choices are made on validation; test is for one final `python -m training evaluate`.
HELD_OUT_SHARES: Mapping[str, float] = MappingProxyType({"validation": 0.15, "test": 0.1})
# A class needs a few clips in each split.
MIN_COUNT = 5 * len(CLASSES)
# Clips per unit of work: 0.2 s each, so progress is smooth and overhead small.
_CHUNK = 32

_SPLITS = 3  # first word of the seed sequence, see clips.py


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryData:
    """An opened dataset: `frames` (N, T, 64, 64, 3) and `tracks` (N, T + 1, 3) are memory maps."""

    frames: Frames
    tracks: Float32s  # NaN in clips that users brought
    classes: Sequence[str]
    labels: Sequence[int]
    splits: Mapping[str, Sequence[int]]


def make_dataset(
    out: Path, count: int, seed: int, progress: "Progress", num_workers: int | None = None
) -> Mapping[str, Any]:
    """Write `count` clips of the dataset `seed` into the folder `out`; return the meta."""
    if count < MIN_COUNT:
        raise UserError(f"count is {count}; give at least {MIN_COUNT} ({len(CLASSES)} classes)")
    if seed < 0:
        raise UserError(f"seed is {seed}; give 0 or more")
    for name, size in ((CLIPS_FILE, CLIP_BYTES), (TRACKS_FILE, TRACK_BYTES)):
        with (out / name).open("wb") as file:
            file.truncate(count * size)
    chunks = [
        (str(out), seed, first, min(first + _CHUNK, count)) for first in range(0, count, _CHUNK)
    ]
    num_workers = min(num_workers or os.cpu_count() or 1, len(chunks))
    if num_workers == 1:
        _follow(map(_write_chunk, chunks), count, progress)
    else:
        # spawn: a fork is unsafe if the caller has threads (torch).
        context = multiprocessing.get_context("spawn")
        with context.Pool(num_workers, initializer=_leave_interrupts_to_the_parent) as pool:
            _follow(pool.imap_unordered(_write_chunk, chunks), count, progress)
    labels = [clip_label(seed, index) for index in range(count)]
    splits = stratified_splits(labels, seed)
    (out / LABELS_FILE).write_text(
        json.dumps({"classes": CLASSES, "labels": labels, "splits": splits}) + "\n"
    )
    return {**dataset_meta(CLASSES, splits), "seed": seed}


def dataset_meta(classes: Sequence[str], splits: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What the manifest says of a dataset."""
    sizes = {name: len(indices) for name, indices in splits.items()}
    count = sum(sizes.values())
    return {
        "classes": list(classes),
        "count": count,
        "shape": [count, *CLIP_SHAPE],
        "splits": sizes,
    }


def _follow(done_chunks: Iterable[int], count: int, progress: "Progress") -> None:
    done = 0
    for num_clips in done_chunks:
        done += num_clips
        progress(done, count)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _write_chunk(chunk: tuple[str, int, int, int]) -> int:
    out, seed, first, end = chunk
    with (
        (Path(out) / CLIPS_FILE).open("r+b") as clips,
        (Path(out) / TRACKS_FILE).open("r+b") as tracks,
    ):
        clips.seek(first * CLIP_BYTES)
        tracks.seek(first * TRACK_BYTES)
        for index in range(first, end):
            frames, track = render_clip(seed, index)
            clips.write(frames.tobytes())
            tracks.write(track.tobytes())
    return end - first


def stratified_splits(labels: Sequence[int], seed: int) -> dict[str, list[int]]:
    """Split each class separately, in an order that depends on the seed and not on the index."""
    splits: dict[str, list[int]] = {name: [] for name in ("train", *HELD_OUT_SHARES)}
    of_class = np.asarray(labels)
    for label in sorted(set(labels)):
        rng = np.random.default_rng([_SPLITS, seed, label])
        left = rng.permutation(np.flatnonzero(of_class == label)).tolist()
        of_this_class = len(left)
        for name, share in HELD_OUT_SHARES.items():
            num_held_out = min(max(1, round(share * of_this_class)), len(left) - 1)
            splits[name] += left[:num_held_out]
            left = left[num_held_out:]
        splits["train"] += left
    return {name: sorted(indices) for name, indices in splits.items()}


def open_dataset(folder: Path) -> TrajectoryData:
    """Open a dataset folder; UserError if labels, splits and clips do not fit each other."""
    for name in (LABELS_FILE, CLIPS_FILE, TRACKS_FILE):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}, so it is not a trajectory dataset; make one with "
                "`python -m training data make --workload trajectory`"
            )
    content = json.loads((folder / LABELS_FILE).read_text())
    classes, labels, splits = content["classes"], content["labels"], content["splits"]
    if not 0 <= min(labels) <= max(labels) < len(classes):
        raise UserError(
            f"{folder / LABELS_FILE} has labels from {min(labels)} to {max(labels)}, but "
            f"{len(classes)} classes; make the dataset again"
        )
    for name, size in ((CLIPS_FILE, CLIP_BYTES), (TRACKS_FILE, TRACK_BYTES)):
        num_bytes = (folder / name).stat().st_size
        if num_bytes != len(labels) * size:
            raise UserError(
                f"{folder / name} has {num_bytes} bytes, but {len(labels)} labels need "
                f"{len(labels) * size}; make or download the dataset again"
            )
    if sorted(chain.from_iterable(splits.values())) != list(range(len(labels))):
        raise UserError(
            f"{folder / LABELS_FILE}: the splits do not contain each clip exactly once; "
            "make the dataset again"
        )
    count = len(labels)
    frames = np.memmap(folder / CLIPS_FILE, dtype=np.uint8, mode="r", shape=(count, *CLIP_SHAPE))
    tracks = np.memmap(folder / TRACKS_FILE, dtype="<f4", mode="r", shape=(count, *TRACK_SHAPE))
    return TrajectoryData(
        frames=frames, tracks=tracks, classes=classes, labels=labels, splits=splits
    )


def shard_range(count: int, shard: int, num_shards: int) -> tuple[int, int]:
    """Return the first clip of an artifact's shard, and the one after its last."""
    return shard * count // num_shards, (shard + 1) * count // num_shards


def split_failures(data: TrajectoryData, split: str) -> list[str]:
    """Return why a split cannot be used for evaluation: one class only, or a missing class."""
    present = {data.labels[index] for index in data.splits[split]}
    if len(present) == 1:
        return [f"every clip of split {split} has the same label {data.classes[present.pop()]}"]
    missing = [name for label, name in enumerate(data.classes) if label not in present]
    return [f"split {split} has no clip of class {name}" for name in missing]
