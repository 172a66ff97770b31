"""The inputs of MAGVIT's Transformer: tokens in three shards, by an untrained tokenizer."""

from dataclasses import replace

import pytest

from tests.training.workloads.trajectory.magvit.scene import SMALL, prior_of
from tests.training.workloads.trajectory.scene import FakeDataset, inputs_of
from training.workload import Inputs
from training.workloads.trajectory.magvit.stages import Tokens


@pytest.fixture(scope="module")
def inputs(dataset: FakeDataset) -> Inputs:
    config = replace(SMALL, num_shards=3)
    prior = prior_of(config)
    stage = Tokens(config=config)
    shards = [stage.make(inputs_of(dataset, config, prior=prior), shard) for shard in range(3)]
    return inputs_of(dataset, config, {"tokens": shards}, prior)
