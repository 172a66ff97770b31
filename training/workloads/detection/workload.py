"""The detection workload: DINO, which finds objects, on data in COCO's format.

python -m training data make --workload detection --out data --count 1200
python -m training run --workload detection --recipe laptop --dataset-uri data --run-uri runs/first
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from training.data_report import DataReport
from training.rungs import autocast_rungs, micro_batch_rungs, offered_rung
from training.workload import Progress, Rung, Workload
from training.workloads.detection import dataset
from training.workloads.detection.config import DetectionConfig, coco_12, full, laptop
from training.workloads.detection.stages import TrainDetector

_MAX_SIDES = (1066, 800)
_FEWER_NOISED = 50
_NUM_QUERIES = (300, 200)
_WIDTH = 192


def _rungs(c: DetectionConfig) -> Sequence[Rung]:
    """The ladder of a recipe; smaller micro-batches accumulate, and count objects as before."""
    taken = []
    if not c.recompute_encoder:
        taken.append(
            Rung(
                name="activations of the encoder recomputed",
                apply=lambda c: replace(c, recompute_encoder=True),
            )
        )
    return [*taken, *micro_batch_rungs(c), *autocast_rungs(c), *_offered(c)]


def _offered(c: DetectionConfig) -> Sequence[Rung]:
    # A shorter side may not be longer than the longest.
    sides = [side for side in _MAX_SIDES if max(c.sides) <= side < c.max_side]
    queries = [number for number in _NUM_QUERIES if number < c.num_queries]
    return [
        *(offered_rung(max_side=side) for side in sides),
        *([offered_rung(denoising_queries=_FEWER_NOISED)] * (c.denoising_queries > _FEWER_NOISED)),
        *(offered_rung(num_queries=number) for number in queries),
        *([offered_rung(width=_WIDTH)] * (c.width > _WIDTH)),
    ]


RECIPES: Mapping[str, Callable[[], DetectionConfig]] = MappingProxyType(
    {"laptop": laptop, "full": full, "coco_12": coco_12}
)
# 1,200 generated floor plans; CubiCasa5K's, with walls and rooms; COCO 2017.
_NOMINAL_SAMPLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "laptop": {"train": 900, "validation": 180},
        "full": {"train": 2_935, "validation": 400},
        "coco_12": {"train": 118_287, "validation": 5_000},
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection(Workload[DetectionConfig]):
    """The workload that the registry imports; its stage is defined in the other files here."""

    name: str = "detection"
    recipes = RECIPES
    nominal_samples = _NOMINAL_SAMPLES

    def stages(self, c: DetectionConfig) -> Sequence[TrainDetector]:
        return (TrainDetector(config=c),)

    def fitted(self, c: DetectionConfig, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """As many classes as there are, and a query for each object of the fullest image."""
        classes = len(meta.get("classes", ())) or c.num_classes
        most = int(meta.get("most_objects", 0))
        return {
            **({"num_classes": str(classes)} if classes != c.num_classes else {}),
            **({"num_queries": str(most)} if most > c.num_queries else {}),
        }

    def rungs(self, c: DetectionConfig) -> Sequence[Rung]:
        return _rungs(c)

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return dataset.make_dataset(out, count, seed, progress)

    def import_folder(
        self, folder: Path, out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return dataset.import_folder(folder, out, seed, progress)

    def check_data(self, folder: Path, progress: Progress) -> DataReport:
        return dataset.check_data(folder, progress)


DETECTION = Detection()
