"""Code that draws from global generators draws from a sample's own, and leaves them alone."""

import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import UserError
from training.numerics import drawing_from
from training.workload import DatasetSamples, Settings, Train


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.random(), random.random()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_what_is_drawn_follows_from_the_generator_and_nothing_else_changes() -> None:
    torch.manual_seed(1)
    undisturbed = draw()
    torch.manual_seed(1)
    states = pickle.dumps(np.random.get_state()), random.getstate()
    with drawing_from(generator(5)):
        first = draw()
    assert torch.rand(()).item() == undisturbed[0]
    assert (pickle.dumps(np.random.get_state()), random.getstate()) == states
    draw()
    with drawing_from(generator(5)):
        assert draw() == first
    with drawing_from(generator(6)):
        assert not set(draw()) & set(first)


def test_a_dataset_s_random_transforms_depend_on_the_sample_alone() -> None:
    class Noisy(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return index, draw()

    samples = DatasetSamples(Noisy())
    assert len(samples) == 3
    assert samples.get(2, 0, generator(7)) == samples.get(2, 0, generator(7))
    assert samples.get(2, 0, generator(7)) != samples.get(2, 1, generator(8))


def test_fails_for_a_dataset_that_has_no_length() -> None:
    class Streamed(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([1])

    with pytest.raises(UserError, match=r"Streamed has no len\(\); use a map-style dataset"):
        DatasetSamples(Streamed())


def test_a_stage_has_the_settings_of_its_config_unless_it_says_otherwise() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Plain(Train):
        config: Any
        settings: Any

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Usual(Train):
        config: Any

    @dataclass(frozen=True, kw_only=True)
    class Holder:
        settings: Settings

    held = Holder(settings=Settings(epochs=1, global_batch=2, micro_batch=2))
    other = Settings(epochs=9, global_batch=2, micro_batch=2)
    assert Usual(config=held).settings is held.settings
    assert Plain(config=held, settings=other).settings is other
    assert not hasattr(Usual(config=None), "settings"), "`check` says that it has none"
