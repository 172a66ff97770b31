"""A step whose images have no object at all teaches a detector what the background is."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from tests.training.durable.attempt.processes import CPU
from tests.training.workloads.detection.watched import Watched, small
from training.durable.attempt.world import RankEnvironment, World
from training.engine.batches import MicroBatch
from training.engine.learner import Learner
from training.preflight.standalone import standalone_inputs
from training.workload import Inputs, Start
from training.workloads.detection.detection_workload import TrainDetector


class _WithoutData(Watched):
    def start(self, m: nn.Module, i: Inputs) -> Start:
        return Start()


def test_a_step_without_an_object_lowers_what_is_found_in_its_images() -> None:
    config = small()
    stage = _WithoutData(TrainDetector(config=config))
    dataset = cast(Any, SimpleNamespace(meta={}))
    inputs = replace(standalone_inputs("detect", config), dataset=dataset)
    learner = Learner(stage, inputs, World(RankEnvironment(), CPU), None, {})
    batch = {
        "images": torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8),
        "sizes": torch.full((2, 2), 64),
        "labels": torch.zeros(2, 0, dtype=torch.long),
        "boxes": torch.zeros(2, 0, 4),
    }
    found = [
        learner.step(
            [(MicroBatch(number=0, epoch=0, ids=(0, 1)), batch)],
            weight=stage.weight(batch),
            num_micro_batches=1,
            step=step,
            num_steps=3,
            lr_factor=1.0,
            own_time=contextlib.nullcontext(),
        ).read()
        for step in range(3)
    ]
    losses = [loss for loss, _, _ in found]
    assert losses[0] > losses[1] > losses[2] > 0
    assert all(norm for _, norm, _ in found)
