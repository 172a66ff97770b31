"""Which batches a compiled stage has code for; without compilation every shape is like another."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from tests.training.tiny import TinyConfig, TinyTrain
from training.engine.batches import CompiledShapes
from training.engine.job import TrainProxy
from training.workload import Batch, Settings


class Stage(TrainProxy):
    def __init__(self, compile_mode: Any) -> None:
        super().__init__(TinyTrain(config=TinyConfig(), name="first", width=2))
        self._compile_mode = compile_mode

    @property
    def settings(self) -> Settings:
        return replace(super().settings, compile_mode=self._compile_mode)


class Bucketed(Stage):
    """Pads the images it is given to a multiple of 32 before anything compiled sees them."""

    def shape_key(self, b: Batch) -> Hashable:
        return -(-b["image"].shape[-1] // 32)


def image(width: int) -> Batch:
    return {"image": torch.empty(1, width)}


def test_without_compilation_only_the_first_step_is_new() -> None:
    shapes = CompiledShapes(Stage(None))
    assert not shapes.have([image(3)])
    shapes.add([image(3)])
    assert shapes.have([image(5), image(8)])


def test_each_micro_batch_of_a_compiled_step_counts_by_itself() -> None:
    shapes = CompiledShapes(Stage("default"))
    shapes.add([image(3), image(5)])
    assert shapes.have([image(5), image(3)])
    assert shapes.have([image(5)])
    assert not shapes.have([image(3), image(8)])


def test_a_compiled_stage_may_say_what_its_code_depends_on() -> None:
    shapes = CompiledShapes(Bucketed("default"))
    shapes.add([image(40)])
    assert shapes.have([image(64)])
    assert not shapes.have([image(65)])


def test_what_is_remembered_is_bounded_and_what_was_used_last_is_kept() -> None:
    shapes = CompiledShapes(Stage("default"))
    shapes.add([image(1), image(2)])
    for width in range(3, 2000):
        shapes.add([image(width), image(1)])
    assert not shapes.have([image(2)])
    assert shapes.have([image(1), image(1999)])
