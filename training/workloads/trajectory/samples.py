"""One split of the clips as samples: features of whole or partial clips, tokens, or mean images.

Only this file decides what a baseline may see: `single_frame` gets the middle frame, `shuffled`
the frames in a random order, `time_average` the mean image.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from training.workload import Inputs, Samples
from training.workloads.trajectory.clips import FRAME_SIZE
from training.workloads.trajectory.dataset import TrajectoryData, open_dataset

Batch: TypeAlias = dict[str, Tensor]
_Item: TypeAlias = tuple[Tensor, int]  # what the model sees, and the clip's number
View: TypeAlias = Literal["clip", "single_frame", "shuffled", "time_average", "tokens"]

# The artifact that a view is made from, and the tensor in it.
_SOURCES: Mapping[View, tuple[str, str]] = MappingProxyType(
    {
        "clip": ("features", "features"),
        "single_frame": ("features", "features"),
        "shuffled": ("features", "features"),
        "time_average": ("mean_images", "mean_image"),
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
            raise ValueError(f"{name} of {starts[-1]} clips, but {count} labels")
        return cls(shards=shards, starts=starts[:-1])

    def __getitem__(self, clip: int) -> Tensor:
        """Return a view of clip number `clip` of the dataset."""
        shard = bisect_right(self.starts, clip) - 1
        return self.shards[shard][clip - self.starts[shard]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSamples(Samples):
    """The clips `indices` as the model sees them, with label, future position and frames."""

    seen: _ShardedTensor
    data: TrajectoryData
    indices: Sequence[int]
    view: View
    shown: frozenset[int] = frozenset()  # clips of the contact sheet

    def __len__(self) -> int:
        return len(self.indices)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> _Item:
        """Sample `index` of the split; only the shuffled control draws from `rng`."""
        clip = self.indices[index]
        x = self.seen[clip]
        if self.view == "single_frame":
            x = x[len(x) // 2 : len(x) // 2 + 1]
        elif self.view == "shuffled":
            x = x[torch.randperm(len(x), generator=rng)]
        return x, clip

    def collate(self, items: Sequence[_Item]) -> Batch:
        """Stack into new memory (the shards are memory maps)."""
        clips = [clip for _, clip in items]
        tracks_BT3 = torch.from_numpy(self.data.tracks[clips])
        # From pixels to about -1 .. 1.
        place_BT2 = tracks_BT3[..., :2] / (FRAME_SIZE / 2) - 1.0
        batch = {
            "x": torch.stack([x for x, _ in items]),
            "labels": torch.tensor([self.data.labels[clip] for clip in clips]),
            "clips": torch.tensor(clips),
            "future": place_BT2[:, -1],
            "last": place_BT2[:, -2],
        }
        with_strip = [clip for clip in clips if clip in self.shown]
        if with_strip:
            frames = np.stack([self.data.frames[clip, list(STRIP_FRAMES)] for clip in with_strip])
            batch["strips"] = torch.from_numpy(frames)
            batch["strip_clips"] = torch.tensor(with_strip)
        return batch


def clip_samples(i: Inputs, split: str, view: View) -> ClipSamples:
    """Return the samples of one split as a stage with this `view` may see them."""
    data = open_dataset(i.dataset.folder)
    artifact, name = _SOURCES[view]
    return ClipSamples(
        seen=_ShardedTensor.of(i.artifact(artifact), name, len(data.labels)),
        data=data,
        indices=data.splits[split],
        view=view,
        shown=frozenset() if split == "train" else frozenset(data.splits[split][:NUM_STRIPS]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSamples(Samples):
    """The frames (T, H, W, 3) in uint8 and the tracks of the clips `indices`."""

    data: TrajectoryData
    indices: Sequence[int]
    shown: frozenset[int]  # clips whose reconstruction is drawn

    def __len__(self) -> int:
        return len(self.indices)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> int:
        """The clip number of sample `index`; `collate` reads the frames of a batch at once."""
        return self.indices[index]

    def collate(self, items: Sequence[int]) -> Batch:
        return {
            "frames": torch.from_numpy(np.stack([self.data.frames[clip] for clip in items])),
            "tracks": torch.from_numpy(self.data.tracks[list(items)]),
            "clips": torch.tensor(list(items)),
            "shown": torch.tensor([clip in self.shown for clip in items]),
        }
