"""One split of the clips' features as samples: the whole clip or its middle frame."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from training.randomness import shuffled

Item = tuple[Tensor, int]
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSamples:
    """Features (T, G, C) and label of the clips `indices`, read from the artifact's shards."""

    shards: Sequence[Tensor]
    starts: Sequence[int]
    labels: Sequence[int]
    indices: Sequence[int]
    single_frame: bool

    def __len__(self) -> int:
        return len(self.indices)

    def features(self, clip: int) -> Tensor:
        """Return a view of the features of clip number `clip` of the dataset."""
        shard = bisect_right(self.starts, clip) - 1
        features_TGC = self.shards[shard][clip - self.starts[shard]]
        if self.single_frame:
            middle = len(features_TGC) // 2
            return features_TGC[middle : middle + 1]
        return features_TGC

    def get(self, index: int, rng: torch.Generator) -> Item:
        """Sample `index` of the split; nothing is augmented, so `rng` is not used."""
        clip = self.indices[index]
        return self.features(clip), self.labels[clip]

    def collate(self, items: Sequence[Item]) -> Batch:
        """Stack into memory of its own (the shards are memory maps)."""
        return {
            "features": torch.stack([features for features, _ in items]),
            "labels": torch.tensor([label for _, label in items]),
        }

    def order(self, epoch: int, seed: int) -> Sequence[int]:
        return shuffled(len(self.indices), epoch, seed)


def feature_samples(
    artifact: Sequence[Mapping[str, Tensor]],
    labels: Sequence[int],
    indices: Sequence[int],
    single_frame: bool,
) -> FeatureSamples:
    """Return the samples of the clips `indices`; the shards must hold a clip for each label."""
    shards = [shard["features"] for shard in artifact]
    starts = [0, *accumulate(len(shard) for shard in shards)]
    if starts[-1] != len(labels):
        raise ValueError(f"features of {starts[-1]} clips, but {len(labels)} labels")
    return FeatureSamples(
        shards=shards,
        starts=starts[:-1],
        labels=labels,
        indices=indices,
        single_frame=single_frame,
    )
