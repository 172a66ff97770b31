"""Stage `mean_images`: each clip's mean over time, which removes the order of its frames.

What the time-average baseline learns from them needs no understanding of time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.artifact_key import artifact_key
from training.workload import Inputs, Prepare
from training.workloads.trajectory.dataset import open_dataset, shard_range

# Increment when the results of this file change: it is part of the artifact's key.
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanImages(Prepare):
    """The Prepare stage: shard s of S contains clips s*N/S to (s+1)*N/S, in order."""

    num_shards: int
    name: str = "mean_images"
    is_shareable: bool = True

    def key(self, i: Inputs) -> str:
        facts = {"version": _VERSION, "num_shards": self.num_shards, "data": i.dataset.fingerprint}
        return artifact_key({"what": self.name, **facts})

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        """Return {"mean_image": (clips, 3, 64, 64) uint8} for the clips of one shard."""
        frames = open_dataset(i.dataset.folder).frames
        first, end = shard_range(len(frames), shard, self.num_shards)
        means_NHWC = np.stack(
            [np.rint(frames[k].mean(axis=0, dtype=np.float32)) for k in range(first, end)]
        )
        images = torch.from_numpy(means_NHWC.astype(np.uint8)).permute(0, 3, 1, 2)
        return {"mean_image": images.contiguous()}
