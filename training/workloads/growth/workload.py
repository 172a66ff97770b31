"""The growth workload: a language model that is trained dense, with experts, and grown, in one run.

python -m training data make --workload growth --out data --count 12000
python -m training run --workload growth --recipe laptop --dataset-uri data --run-uri runs/first
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from training.rungs import autocast_rungs, micro_batch_rungs
from training.sources import SourceFile
from training.workload import Progress, Rung, Workload
from training.workloads.growth.config import GrowthConfig, full, laptop, literal
from training.workloads.growth.stages import TrainPhase, phases
from training.workloads.growth.text.dataset import TextOptions, import_dataset, make_dataset
from training.workloads.growth.text.tokens import vocabulary_refusals

RECIPES: Mapping[str, Callable[[], GrowthConfig]] = MappingProxyType(
    {"laptop": laptop, "full": full, "literal": literal}
)
# Windows of 128 tokens of 12,000 generated stories; of 256 tokens of TinyStories, whose 2.1 million
# stories are about 470 million of GPT-2's tokens. Of validation, as many as are evaluated.
_TINY_STORIES = {"train": 1_800_000, "validation": 512}
_NOMINAL_SAMPLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "laptop": {"train": 8_600, "validation": 128},
        "full": _TINY_STORIES,
        "literal": _TINY_STORIES,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth(Workload[GrowthConfig]):
    """The workload that the registry imports; its stages are defined in the other files here."""

    name: str = "growth"
    data_options: TextOptions = field(default_factory=TextOptions)
    recipes = RECIPES
    nominal_samples = _NOMINAL_SAMPLES

    def stages(self, c: GrowthConfig) -> Sequence[TrainPhase]:
        return phases(c)

    def fitted(self, c: GrowthConfig, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """The dataset's vocabulary, where the recipe's is too small, or far too large."""
        if vocabulary_refusals(meta, c.vocab_size):
            return {"vocab_size": str(meta["vocab_size"])}
        return {}

    def rungs(self, c: GrowthConfig) -> Sequence[Rung]:
        """First what the optimizer keeps, then activations, the micro-batch, and the precision."""
        rungs = []
        if c.lean_optimizer != "all":
            rungs.append(
                Rung(
                    name="optimizer with moments in bfloat16",
                    apply=lambda c: replace(c, lean_optimizer="all"),
                )
            )
        if c.recompute != "all":
            rungs.append(
                Rung(name="activations recomputed", apply=lambda c: replace(c, recompute="all"))
            )
        return [*rungs, *micro_batch_rungs(c), *autocast_rungs(c)]

    def with_data_options(self, options: TextOptions) -> "Growth":
        """The workload whose datasets are made with these options."""
        return replace(self, data_options=options)

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress, options=self.data_options)

    def import_dataset(
        self, files: Sequence[SourceFile], out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return import_dataset(files, out, seed, progress, options=self.data_options)


GROWTH = Growth()
