"""The trajectory workload: clips of a moving ball, classified by how it moves.

There are two kinds of recipes: a frozen ResNet-18 with a Transformer over time, and a small MAGVIT.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from training import Prepare, Progress, Rung, Train, Workload, autocast_rungs, micro_batch_rungs
from training.durable import SourceFile
from training.workloads.trajectory.clip_dataset import make_dataset
from training.workloads.trajectory.config import (
    ClipOptions,
    MagvitConfig,
    RecipeConfig,
    TrajectoryConfig,
    full,
    laptop,
    magvit_b,
    magvit_full,
    magvit_laptop,
    reference,
)
from training.workloads.trajectory.features import Features, MeanImages
from training.workloads.trajectory.imported import import_dataset
from training.workloads.trajectory.magvit.generation import TrainTransformer
from training.workloads.trajectory.magvit.stages import Tokens, TrainTokenizer
from training.workloads.trajectory.model import TrainHead, TrainTimeAverage
from training.workloads.trajectory.tracker import Tracks, TrainTracker


def _frozen_stages(c: TrajectoryConfig) -> Sequence[Prepare | Train]:
    """Return the stages: baselines, frozen ResNet-18 per frame, a Transformer over time."""
    epochs, single, mixed = c.settings.epochs, c.single_frame_epochs, c.shuffled_epochs
    head = TrainHead(config=c, name="head", view="clip", epochs=epochs)
    if not c.baselines:
        return (Features(config=c), head)
    return (
        *_time_average(c),
        Tracks(config=c),
        TrainTracker(config=c, name="tracker", view="tracker", epochs=c.tracker_epochs),
        Features(config=c),
        TrainHead(config=c, name="single_frame", view="single_frame", epochs=single),
        TrainHead(config=c, name="shuffled", view="shuffled", epochs=mixed),
        head,
    )


def _magvit_stages(c: MagvitConfig) -> Sequence[Prepare | Train]:
    """Return the stages: time-average baseline, tokenizer, tokens, masked Transformer over them."""
    return (
        *(_time_average(c) if c.baselines else ()),
        TrainTokenizer(config=c),
        Tokens(config=c),
        TrainTransformer(config=c, name="transformer", view="tokens", epochs=c.settings.epochs),
    )


def _time_average(c: RecipeConfig) -> Sequence[Prepare | Train]:
    """Return the baseline's stages; it sees everything except the order of the frames."""
    epochs = c.time_average_epochs
    return (
        MeanImages(config=c),
        TrainTimeAverage(config=c, name="time_average", view="time_average", epochs=epochs),
    )


_AnyConfig: TypeAlias = TrajectoryConfig | MagvitConfig

RECIPES: Mapping[str, Callable[[], _AnyConfig]] = MappingProxyType(
    {
        "laptop": laptop,
        "full": full,
        "reference": reference,
        "magvit_laptop": magvit_laptop,
        "magvit_full": magvit_full,
        "magvit_b": magvit_b,
    }
)
# The datasets for which the recipes are made: 1,000, 4,000 and 10,000 clips.
_NOMINAL_SAMPLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "laptop": {"train": 800, "validation": 100},
        "full": {"train": 8_000, "validation": 1_000},
        "reference": {"train": 8_000, "validation": 1_000},
        "magvit_laptop": {"train": 3_200, "validation": 400},
        "magvit_full": {"train": 8_000, "validation": 1_000},
        "magvit_b": {"train": 8_000, "validation": 1_000},
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trajectory(Workload[_AnyConfig]):
    """The workload that the registry imports; its stages are defined in the other files here."""

    name: str = "trajectory"
    data_options: ClipOptions = field(default_factory=ClipOptions)
    recipes = RECIPES
    nominal_samples = _NOMINAL_SAMPLES

    def stages(self, c: _AnyConfig) -> Sequence[Prepare | Train]:
        return _magvit_stages(c) if isinstance(c, MagvitConfig) else _frozen_stages(c)

    def fitted(self, c: _AnyConfig, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """Use the dataset's own classes; do not learn positions if they are unknown."""
        names = ",".join(meta.get("classes", ())) or c.classes
        found = {"classes": names} if names != c.classes else {}
        return found if meta.get("tracks") != "none" else {**found, "position_weight": "0.0"}

    def rungs(self, c: _AnyConfig) -> Sequence[Rung]:
        least = c.least_micro_batch if isinstance(c, MagvitConfig) else 1
        return [*micro_batch_rungs(c, least), *autocast_rungs(c)]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress, self.data_options.difficulty)

    def import_dataset(
        self, files: Sequence[SourceFile], out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return import_dataset(files, out, seed, progress, self.data_options)


TRAJECTORY = _Trajectory()
