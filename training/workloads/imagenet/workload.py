"""The imagenet workload: a ResNet trained on images in shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from training.dataset_output import FinishedFiles, Output
from training.rungs import autocast_rungs, micro_batch_rungs
from training.sources import Brought
from training.workload import Prepare, Progress, Rung, Train, Workload
from training.workloads.imagenet.config import RECIPES, ImagenetConfig
from training.workloads.imagenet.dataset import make_dataset, pack_dataset
from training.workloads.imagenet.images import ImageOptions
from training.workloads.imagenet.stages import TrainClassifier

_IMAGENET = {"train": 1_281_167, "validation": 50_000}
_NOMINAL_SAMPLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {name: {"train": 960, "validation": 240} if name == "laptop" else _IMAGENET for name in RECIPES}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Imagenet(Workload[ImagenetConfig]):
    """The workload that the registry imports."""

    name: str = "imagenet"
    data_options: ImageOptions = field(default_factory=ImageOptions)
    recipes = RECIPES
    nominal_samples = _NOMINAL_SAMPLES

    def stages(self, c: ImagenetConfig) -> Sequence[Prepare | Train]:
        return [TrainClassifier(config=c)]

    def fitted(self, c: ImagenetConfig, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """As many classes as there are."""
        num = len(meta.get("classes", ())) or c.num_classes
        return {"num_classes": str(num)} if num != c.num_classes else {}

    def rungs(self, c: ImagenetConfig) -> Sequence[Rung]:
        return [*micro_batch_rungs(c), *autocast_rungs(c)]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress)

    def with_data_options(self, options: ImageOptions) -> "Imagenet":
        """The workload that packs images with these options."""
        return replace(self, data_options=options)

    def pack_dataset(
        self, files: Sequence[Brought], output: Output, seed: int, progress: Progress
    ) -> FinishedFiles:
        return pack_dataset(files, output, seed, progress, self.data_options)


IMAGENET = Imagenet()
