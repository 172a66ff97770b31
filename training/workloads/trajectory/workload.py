"""The trajectory workload: clips of a moving ball, classified by how it moves.

Recipes of two kinds: a frozen ResNet-18 with a Transformer over time, and a small MAGVIT.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from training.rungs import autocast_rungs, micro_batch_rungs
from training.sources import SourceFile
from training.workload import Prepare, Progress, Rung, Train, Workload
from training.workloads.trajectory.config import (
    MagvitConfig,
    RecipeConfig,
    TrajectoryConfig,
    full,
    laptop,
    magvit_full,
    magvit_laptop,
)
from training.workloads.trajectory.dataset import import_dataset, make_dataset
from training.workloads.trajectory.features import Features, MeanImages
from training.workloads.trajectory.magvit.stages import Tokens, TrainTokenizer, TrainTransformer
from training.workloads.trajectory.model import TrainHead, TrainTimeAverage


def _frozen_stages(c: TrajectoryConfig) -> Sequence[Prepare | Train]:
    """Frozen ResNet-18 per frame, a Transformer over time, and three baselines."""
    epochs, single, mixed = c.settings.epochs, c.single_frame_epochs, c.shuffled_epochs
    return (
        MeanImages(num_shards=c.num_shards),
        Features(config=c),
        _time_average(c),
        TrainHead(config=c, name="single_frame", view="single_frame", epochs=single),
        TrainHead(config=c, name="shuffled", view="shuffled", epochs=mixed),
        TrainHead(config=c, name="head", view="clip", epochs=epochs),
    )


def _magvit_stages(c: MagvitConfig) -> Sequence[Prepare | Train]:
    """A tokenizer, its tokens, a masked Transformer over them, and the time-average baseline."""
    return (
        MeanImages(num_shards=c.num_shards),
        _time_average(c),
        TrainTokenizer(config=c),
        Tokens(config=c),
        TrainTransformer(config=c, name="transformer", view="tokens", epochs=c.settings.epochs),
    )


def _time_average(c: RecipeConfig) -> TrainTimeAverage:
    """The baseline that sees everything except the order of the frames."""
    return TrainTimeAverage(
        config=c, name="time_average", view="time_average", epochs=c.time_average_epochs
    )


_AnyConfig: TypeAlias = TrajectoryConfig | MagvitConfig

RECIPES: Mapping[str, Callable[[], _AnyConfig]] = MappingProxyType(
    {
        "laptop": laptop,
        "full": full,
        "magvit_laptop": magvit_laptop,
        "magvit_full": magvit_full,
    }
)
# The datasets that the recipes are made for: 1,000, 4,000 and 10,000 clips.
_NOMINAL_SAMPLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "laptop": {"train": 750, "validation": 150},
        "full": {"train": 7_500, "validation": 1_500},
        "magvit_laptop": {"train": 3_000, "validation": 600},
        "magvit_full": {"train": 7_500, "validation": 1_500},
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory(Workload[_AnyConfig]):
    """The workload that the registry imports; its stages are defined in the other files here."""

    name: str = "trajectory"
    recipes = RECIPES
    nominal_samples = _NOMINAL_SAMPLES

    def stages(self, c: _AnyConfig) -> Sequence[Prepare | Train]:
        return _magvit_stages(c) if isinstance(c, MagvitConfig) else _frozen_stages(c)

    def fitted(self, c: _AnyConfig, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """The dataset's own classes."""
        names = ",".join(meta.get("classes", ())) or c.classes
        return {"classes": names} if names != c.classes else {}

    def rungs(self, c: _AnyConfig) -> Sequence[Rung]:
        return [*micro_batch_rungs(c), *autocast_rungs(c)]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress)

    def import_dataset(
        self, files: Sequence[SourceFile], out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return import_dataset(files, out, seed, progress)


TRAJECTORY = Trajectory()
