"""The imagenet workload: a ResNet trained on images in shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from training.imagenet.config import ImagenetConfig
from training.imagenet.dataset import import_dataset
from training.imagenet.pictures import make_dataset
from training.imagenet.recipes import RECIPES
from training.imagenet.stages import TrainClassifier
from training.rungs import autocast_rungs, micro_batch_rungs
from training.sources import SourceFile
from training.workload import Prepare, Progress, Rung, Train

_IMAGENET = {"train": 1_281_167, "validation": 50_000}
NOMINAL_SAMPLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {name: {"train": 960, "validation": 240} if name == "laptop" else _IMAGENET for name in RECIPES}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Imagenet:
    """The workload that the registry imports."""

    name: str = "imagenet"

    @property
    def recipes(self) -> Mapping[str, Callable[[], ImagenetConfig]]:
        return RECIPES

    @property
    def placement_fields(self) -> frozenset[str]:
        return frozenset({"loader_workers"})

    @property
    def nominal_samples(self) -> Mapping[str, Mapping[str, int]]:
        return NOMINAL_SAMPLES

    def stages(self, c: ImagenetConfig) -> Sequence[Prepare | Train]:
        return [TrainClassifier(config=c)]

    def rungs(self, c: ImagenetConfig) -> Sequence[Rung]:
        return [*micro_batch_rungs(c), *autocast_rungs(c)]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress)

    def import_dataset(
        self, files: Sequence[SourceFile], out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return import_dataset(files, out, seed, progress)


IMAGENET = Imagenet()
