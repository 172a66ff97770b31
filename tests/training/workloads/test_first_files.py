"""What a stage says that its first step reads, against what its samples say that they read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from training.registry import load_workload, resolve_config
from training.workload import Samples, Train
from training.workloads.detection.samples import DetectionSamples
from training.workloads.imagenet.packing import Shards
from training.workloads.imagenet.samples import ImageSamples

NUM_SHARDS, IMAGES = 24, 200


def images(stage: Any) -> Samples:
    """Samples in shards of which only the index is there."""
    shards = Shards.__new__(Shards)
    shards.index = np.zeros(NUM_SHARDS * IMAGES, [("shard", "<u4")])
    shards.index["shard"] = np.repeat(np.arange(NUM_SHARDS), IMAGES)
    shards._split = "train"
    window = stage.config.shuffle_window
    return ImageSamples(shards=shards, size=lambda _: 224, window=window, seed=0)


def objects(stage: Any) -> Samples:
    """Samples in a file each."""
    num = NUM_SHARDS * IMAGES
    files = np.array([f"{number}.jpg" for number in range(num)])
    split: Any = SimpleNamespace(name="train", files=files, __len__=lambda: num)
    return DetectionSamples(split=split, dataset=None, augmentation=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workload", "recipe", "make"),
    [
        ("imagenet", "full", images),
        ("imagenet", "laptop", images),
        ("detection", "full", objects),
        ("detection", "laptop", objects),
    ],
)
def test_a_first_step_reads_as_many_files_as_its_stage_says(
    workload: str, recipe: str, make: Any
) -> None:
    loaded = load_workload(workload)
    config = resolve_config(loaded, recipe, {})
    (stage,) = (each for each in loaded.stages(config) if isinstance(each, Train))
    samples = make(stage)
    order = np.random.default_rng(0).permutation(NUM_SHARDS * IMAGES)
    if workload == "imagenet":
        order = np.asarray(samples.order(0, 0))
    batch = order[: stage.settings.global_batch]
    read = len(samples.files(batch))
    # A batch of a few images may miss a shard of its window.
    assert 0.9 * stage.first_files() <= read <= stage.first_files()
