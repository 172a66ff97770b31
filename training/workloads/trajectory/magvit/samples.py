"""Whole clips as samples, read from the memory-mapped file."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.workload import Samples
from training.workloads.trajectory.dataset import TrajectoryData
from training.workloads.trajectory.samples import Batch


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
