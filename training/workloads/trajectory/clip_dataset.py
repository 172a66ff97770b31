"""The dataset on disk (clips.u8 and tracks.f32, memory mapped; labels.json), and its samples.

It is rendered or imported (imported.py); imported clips have no tracks (NaN, which no loss or
metric counts). Opening it refuses files that do not match each other. Only this file decides what a
baseline may see: `single_frame` gets the middle frame, `shuffled` the frames in random order,
`time_average` the mean image.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from contract.errors import UserError
from training import Inputs, Progress, Samples, in_processes
from training.workloads.trajectory.clips import (
    CLASSES,
    CLIP_BYTES,
    CLIP_SHAPE,
    CLIPS_FILE,
    FRAME_SIZE,
    FUTURE_FRAMES,
    NUM_FRAMES,
    TRACK_BYTES,
    TRACK_SHAPE,
    TRACKS_FILE,
    Float32s,
    Frames,
    clip_label,
    write_chunk,
)

_LABELS_FILE = "labels.json"
# A class needs a few clips in each split.
_MIN_COUNT = 5 * len(CLASSES)
# Clips per unit of work: 0.2 s each, so progress is smooth and overhead small.
_CHUNK = 32

_SPLITS = 3  # first word of the seed sequence, see clips.py


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrajectoryData:
    """An opened dataset: `frames` (N, T, 64, 64, 3) and `tracks` (N, T + 1, 3) are memory maps."""

    frames: Frames
    tracks: Float32s  # NaN in imported clips
    classes: Sequence[str]
    labels: Sequence[int]
    splits: Mapping[str, Sequence[int]]


def make_dataset(
    out: Path,
    count: int,
    seed: int,
    progress: Progress,
    difficulty: str = "easy",
    validation_share: float = 0.1,
    num_workers: int | None = None,
) -> Mapping[str, Any]:
    """Write `count` clips of the dataset `seed` into the folder `out`; return the meta."""
    if count < _MIN_COUNT:
        raise UserError(f"count is {count}; give at least {_MIN_COUNT} ({len(CLASSES)} classes)")
    if seed < 0:
        raise UserError(f"seed is {seed}; give 0 or more")
    for name, size in ((CLIPS_FILE, CLIP_BYTES), (TRACKS_FILE, TRACK_BYTES)):
        with (out / name).open("wb") as file:
            file.truncate(count * size)
    chunks = [
        (str(out), difficulty, seed, first, min(first + _CHUNK, count))
        for first in range(0, count, _CHUNK)
    ]
    done = 0
    for _, num_clips in in_processes(write_chunk, chunks, num_workers):
        done += num_clips
        progress(done, count)
    labels = [clip_label(seed, index) for index in range(count)]
    splits = stratified_splits(labels, seed, validation_share)
    return {**write_labels(out, CLASSES, labels, splits), "seed": seed, "difficulty": difficulty}


def write_labels(
    out: Path, classes: Sequence[str], labels: Sequence[int], splits: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Write labels.json; return what the manifest says about the dataset."""
    content = {"classes": classes, "labels": labels, "splits": splits}
    (out / _LABELS_FILE).write_text(json.dumps(content) + "\n")
    sizes = {name: len(indices) for name, indices in splits.items()}
    count = sum(sizes.values())
    return {
        "classes": list(classes),
        "count": count,
        "shape": [count, *CLIP_SHAPE],
        "splits": sizes,
    }


def stratified_splits(labels: Sequence[int], seed: int, share: float = 0.1) -> dict[str, list[int]]:
    """Split each class separately, in an order that depends on the seed, not on the index.

    `share` of them are for validation, on which choices are made, a tenth for test: for one final
    `python -m training evaluate`.
    """
    splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    of_class = np.asarray(labels)
    for label in sorted(set(labels)):
        rng = np.random.default_rng([_SPLITS, seed, label])
        left = rng.permutation(np.flatnonzero(of_class == label)).tolist()
        of_this_class = len(left)
        for name, part in (("validation", share), ("test", 0.1)):
            num_held_out = min(max(1, round(part * of_this_class)), len(left) - 1)
            splits[name] += left[:num_held_out]
            left = left[num_held_out:]
        splits["train"] += left
    return without_partial_test(splits, labels)


def without_partial_test(
    splits: Mapping[str, Sequence[int]], labels: Sequence[int]
) -> dict[str, list[int]]:
    """Return sorted splits, the clips for test in train if they lack a class."""
    found = {name: sorted(indices) for name, indices in splits.items()}
    if len({labels[clip] for clip in found.get("test", ())}) < len(set(labels)):
        found["train"] = sorted([*found["train"], *found.pop("test", ())])
    return found


def open_dataset(folder: Path) -> _TrajectoryData:
    """Open a dataset folder; UserError if labels, splits and clips do not match each other."""
    for name in (_LABELS_FILE, CLIPS_FILE, TRACKS_FILE):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}, so it is not a trajectory dataset; make one with "
                "`python -m training data make --workload trajectory`"
            )
    content = json.loads((folder / _LABELS_FILE).read_text())
    classes, labels, splits = content["classes"], content["labels"], content["splits"]
    if not 0 <= min(labels) <= max(labels) < len(classes):
        raise UserError(
            f"{folder / _LABELS_FILE} has labels from {min(labels)} to {max(labels)}, but "
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
            f"{folder / _LABELS_FILE}: the splits do not contain each clip exactly once; "
            "make the dataset again"
        )
    count = len(labels)
    frames = np.memmap(folder / CLIPS_FILE, dtype=np.uint8, mode="r", shape=(count, *CLIP_SHAPE))
    tracks = np.memmap(folder / TRACKS_FILE, dtype="<f4", mode="r", shape=(count, *TRACK_SHAPE))
    return _TrajectoryData(
        frames=frames, tracks=tracks, classes=classes, labels=labels, splits=splits
    )


def shard_frames(folder: Path, shard: int, num_shards: int) -> tuple[Frames, int, int]:
    """Return all memory-mapped clips, (N, T, 64, 64, 3), and an artifact shard's first and end."""
    frames = open_dataset(folder).frames
    first, end = (each * len(frames) // num_shards for each in (shard, shard + 1))
    return frames, first, end


def split_failures(data: _TrajectoryData, split: str) -> list[str]:
    """Return why a split cannot be used for evaluation: one class only, or a missing class."""
    present = {data.labels[index] for index in data.splits[split]}
    if len(present) == 1:
        return [f"every clip of split {split} has the same label {data.classes[present.pop()]}"]
    missing = [name for label, name in enumerate(data.classes) if label not in present]
    return [f"split {split} has no clip of class {name}" for name in missing]


Batch: TypeAlias = dict[str, Tensor]
# In this order: what the model sees, the clip's number, and the numbers of its frames.
_Item: TypeAlias = tuple[Tensor, int, list[int]]
View: TypeAlias = Literal["clip", "single_frame", "shuffled", "time_average", "tracker", "tokens"]

# The views that see frames.
_FRAME_VIEWS: frozenset[View] = frozenset({"clip", "single_frame", "shuffled"})
# The artifact that a view is made from, and the tensor in it.
_SOURCES: Mapping[View, tuple[str, str]] = MappingProxyType(
    {
        "clip": ("features", "features"),
        "single_frame": ("features", "features"),
        "shuffled": ("features", "features"),
        "time_average": ("mean_images", "mean_image"),
        "tracker": ("tracks", "tracks"),
        "tokens": ("tokens", "tokens"),
    }
)

# The contact sheet shows these frames of the first samples of an evaluation.
NUM_STRIPS = 24
STRIP_FRAMES = (0, 6, 12, 18, 25, 31)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShardedTensor:
    """One tensor of an artifact, indexed by clip across its shards."""

    shards: Sequence[Tensor]
    starts: Sequence[int]

    @classmethod
    def of(
        cls, artifact: Sequence[Mapping[str, Tensor]], name: str, count: int
    ) -> "_ShardedTensor":
        """Open `name`; the shards must contain `count` clips in total."""
        shards = [shard[name] for shard in artifact]
        starts = [0, *accumulate(len(shard) for shard in shards)]
        if starts[-1] != count:
            raise ValueError(f"{name} has {starts[-1]} clips, but there are {count} labels")
        return cls(shards=shards, starts=starts[:-1])

    def __getitem__(self, clip: int) -> Tensor:
        """Return a view of clip number `clip` of the dataset."""
        shard = bisect_right(self.starts, clip) - 1
        return self.shards[shard][clip - self.starts[shard]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSamples(Samples):
    """The clips `indices` as the model sees them, with label, future position and frames."""

    seen: _ShardedTensor
    data: _TrajectoryData
    indices: Sequence[int]
    view: View
    shown: frozenset[int] = frozenset()  # clips of the contact sheet
    frame_stride: int = 1
    has_frames: bool = False

    @classmethod
    def of(cls, i: Inputs, split: str, view: View, **of_frames: Any) -> "ClipSamples":
        """Open the samples of one split as a stage with this `view` may see them."""
        data = open_dataset(i.dataset.folder)
        artifact, name = _SOURCES[view]
        indices = data.splits[split]
        return cls(
            seen=_ShardedTensor.of(i.artifact(artifact), name, len(data.labels)),
            data=data,
            indices=indices,
            view=view,
            **of_frames,
            shown=frozenset() if split == "train" else frozenset(indices[:NUM_STRIPS]),
        )

    def __len__(self) -> int:
        return len(self.indices)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> _Item:
        """Return sample `index` of the split; only the shuffled control draws from `rng`."""
        clip = self.indices[index]
        x = self.seen[clip]
        if self.view in ("tokens", "tracker"):
            return x, clip, list(range(NUM_FRAMES))
        if self.view not in _FRAME_VIEWS:
            return x, clip, []
        places = torch.arange(len(x))
        if self.view == "single_frame":
            places = places[len(x) // 2 : len(x) // 2 + 1]
        elif self.view == "shuffled":
            places = torch.randperm(len(x), generator=rng)
        return x[places], clip, (self.frame_stride * places).tolist()

    def collate(self, items: Sequence[_Item]) -> Batch:
        """Stack into new memory (the shards are memory maps)."""
        clips = [clip for _, clip, _ in items]
        tracks_BT3 = torch.from_numpy(self.data.tracks[clips])
        # From pixels to about -1 .. 1.
        place_BT2 = tracks_BT3[..., :2] / (FRAME_SIZE / 2) - 1.0
        batch = {
            "x": torch.stack([x for x, _, _ in items]),
            "labels": torch.tensor([self.data.labels[clip] for clip in clips]),
            "clips": torch.tensor(clips),
            "last": place_BT2[:, -2],
            "steady": place_BT2[:, -2] + FUTURE_FRAMES * (place_BT2[:, -2] - place_BT2[:, -3]),
            "futures": place_BT2[:, -1:],
        }
        if items[0][2]:
            frames_BT = torch.tensor([frames for _, _, frames in items])
            batch["places"] = place_BT2[torch.arange(len(clips))[:, None], frames_BT]
            batch["futures"] = self._futures(place_BT2, frames_BT)
        if self.has_frames:
            frames = np.stack([self.data.frames[clip, which] for _, clip, which in items])
            batch["frames"] = torch.from_numpy(frames)
        with_strip = [clip for clip in clips if clip in self.shown]
        if with_strip:
            which = slice(None) if self.view == "tokens" else list(STRIP_FRAMES)
            frames = np.stack([self.data.frames[clip, which] for clip in with_strip])
            batch["strips"] = torch.from_numpy(frames)
            batch["strip_clips"] = torch.tensor(with_strip)
        return batch

    def _futures(self, place_BT2: Tensor, frames_BT: Tensor) -> Tensor:
        """Return each frame's future place (B, T, 2), as far ahead as that of the last frame.

        It is NaN if the clip has ended by then, and for all shuffled frames except the last.
        """
        then_BT = frames_BT + (NUM_FRAMES - 1 + FUTURE_FRAMES - frames_BT[:, -1:])
        is_known_BT = (then_BT < NUM_FRAMES) & (self.view != "shuffled")
        clips_B1 = torch.arange(len(frames_BT))[:, None]
        future_BT2 = place_BT2[clips_B1, then_BT.clamp(0, NUM_FRAMES - 1)]
        future_BT2 = future_BT2.where(is_known_BT[..., None], torch.nan)
        return torch.cat([future_BT2[:, :-1], place_BT2[:, -1:]], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSamples(Samples):
    """The frames (T, H, W, 3) in uint8 and the tracks of the clips `indices`."""

    data: _TrajectoryData
    indices: Sequence[int]
    shown: frozenset[int]  # clips whose reconstruction is drawn

    def __len__(self) -> int:
        return len(self.indices)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> int:
        """Return sample `index`'s clip number; `collate` reads the frames of a batch at once."""
        return self.indices[index]

    def collate(self, items: Sequence[int]) -> Batch:
        return {
            "frames": torch.from_numpy(np.stack([self.data.frames[clip] for clip in items])),
            "tracks": torch.from_numpy(self.data.tracks[list(items)]),
            "clips": torch.tensor(list(items)),
            "shown": torch.tensor([clip in self.shown for clip in items]),
        }
