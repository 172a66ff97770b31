"""Every recipe resumes bit for bit, shown on 40 steps of each Train stage's real model.

What is smaller than in the recipe is given as overrides, with the reason; the code is the recipe's.
"""

import argparse
import json
import subprocess
import sys

import pytest
from torch import nn

from contract.grammar import Interval, parse_interval
from training.cli.run import add_run
from training.settings import changed
from training.workload import Train
from training.workloads.trajectory.trajectory_workload import RECIPES, TRAJECTORY

STEPS = 40
CHECKPOINT_INTERVAL = "2epochs"

# By recipe: what is overridden, and how many clips are made (at least 55: some of each class in
# each split).
SMALLER = {
    # Whole, but for the number of clips.
    "demo": ((), 132),
    "laptop": ((), 100),
    # Weights cannot be fetched in a test, and 4 threads are more than a small machine has.
    "reference": (("weights=random", "num_threads=1", "num_shards=4", "baselines=true"), 100),
    # And a batch of 4 instead of 64: the path on pixels takes most of the time.
    "full": (
        (
            *("weights=random", "num_threads=1", "num_shards=4", "image_size=64"),
            *("global_batch=4", "micro_batch=4"),
        ),
        55,
    ),
    # A batch of 4 instead of 16: the Transformer over 16x256 tokens takes most of the time.
    "magvit_laptop": (("global_batch=4", "micro_batch=4", "num_shards=4"), 55),
    # Convolutions at full resolution: a batch of 1 instead of 4, and of 4 instead of 16 tokens.
    "magvit_full": (
        ("tokenizer_batch=1", "global_batch=4", "micro_batch=4", "num_threads=1", "num_shards=4"),
        55,
    ),
    # Of the published size two layers.
    "magvit_b": (
        (
            *("tokenizer_batch=1", "global_batch=4", "micro_batch=4", "num_threads=1"),
            *("num_shards=4", "weights=random", "tokenizer_width=16", "width=48", "num_layers=2"),
        ),
        55,
    ),
}


def test_a_run_commits_every_two_epochs_unless_told_otherwise() -> None:
    parser = argparse.ArgumentParser()
    add_run(parser)
    asked = ["--workload=trajectory", "--recipe=laptop", "--dataset-uri=d", "--run-uri=r"]
    default = parser.parse_args(asked).checkpoint_interval
    assert default == Interval(value=2, unit="epochs") == parse_interval(CHECKPOINT_INTERVAL)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_stage_of_a_recipe_takes_its_loader_workers(recipe: str) -> None:
    config = changed(RECIPES[recipe](), loader_workers=3)
    train = [stage for stage in TRAJECTORY.stages(config) if isinstance(stage, Train)]
    assert {stage.settings.loader_workers for stage in train} == {3}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_recipes_of_a_gpu_have_fused_optimizers_and_the_others_torch_s_choice(
    recipe: str,
) -> None:
    config = RECIPES[recipe]()
    train = [stage for stage in TRAJECTORY.stages(config) if isinstance(stage, Train)]
    optimizers = [stage.optimizer(nn.Linear(2, 2)) for stage in train]
    is_small = "laptop" in recipe or recipe == "demo"
    assert {o.defaults["fused"] for o in optimizers} == {None if is_small else True}
    assert {o.defaults["foreach"] for o in optimizers} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_forty_steps_resume_bit_for_bit(recipe: str) -> None:
    overrides, count = SMALLER[recipe]
    options = [f"--recipe={recipe}", f"--count={count}", f"--steps={STEPS}", "--json"]
    options += [f"--checkpoint-interval={CHECKPOINT_INTERVAL}"]
    options += [f"--override={override}" for override in overrides]
    command = [sys.executable, "-m", "training", "check", "trajectory", *options]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(result.stdout)
    assert record["resumes_exactly"]
    train = [s.name for s in TRAJECTORY.stages(RECIPES[recipe]()) if isinstance(s, Train)]
    for stage in train:
        killed = [s for s in record["interruptions"] if s.startswith(f"killed at stage '{stage}'")]
        assert len(killed) == 2
        assert all("resumes from the periodic commit" in text for text in killed)
