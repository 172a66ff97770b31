"""The recipes' models have the documented sizes, and a config that fits no model is refused."""

from typing import Any

import pytest

from training.settings import changed
from training.workloads.growth.config import GrowthConfig, full, laptop
from training.workloads.growth.growth_workload import GROWTH, RECIPES, TrainPhase, _Decay
from training.workloads.growth.model import parameter_counts


def phase(c: GrowthConfig, name: str) -> TrainPhase:
    return next(stage for stage in GROWTH.stages(c) if stage.name == name)


def test_every_recipe_grows_in_both_transitions() -> None:
    for recipe in RECIPES.values():
        stages = GROWTH.stages(recipe())
        assert [stage.name for stage in stages] == ["dense", "experts", "grown"]
        counts = [parameter_counts(stage.architecture) for stage in stages]
        assert counts == sorted(counts) and len(set(counts)) == 3


def test_the_learning_rate_rises_once_and_falls_at_the_end_of_the_run() -> None:
    dense, experts, grown = (stage.settings for stage in GROWTH.stages(laptop()))
    assert dense.warmup_steps > 0 == experts.warmup_steps == grown.warmup_steps
    assert dense.schedule == experts.schedule == "constant"
    decay = _Decay(share=0.5, final=0.1)
    assert [decay(step, 100) for step in (0, 50)] == [1.0, 1.0]
    assert decay(75, 100) == pytest.approx(0.55)
    assert 0.1 < decay(99, 100) < 0.12


def test_the_largest_model_s_optimizer_steps_in_backward_unless_gradients_are_accumulated() -> None:
    c = full()
    assert [stage.settings.optimizer_in_backward for stage in GROWTH.stages(c)] == [
        *(False, False, True)
    ]
    assert phase(c, "grown").settings.clip_norm is None
    accumulated = phase(changed(c, micro_batch=8), "grown").settings
    assert not accumulated.optimizer_in_backward and accumulated.clip_norm == c.settings.clip_norm


def test_the_ladder_takes_memory_before_it_takes_numbers() -> None:
    names = [rung.name for rung in GROWTH.rungs(laptop())]
    assert names[:2] == ["optimizer with moments in bfloat16", "activations recomputed"]
    assert names[-1] == "autocast bfloat16"
    assert [rung.name for rung in GROWTH.rungs(full())][-1] == "micro-batch 1"
    for rung in GROWTH.rungs(laptop()):
        assert rung.apply(laptop()) != laptop()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"width": 33}, "width 33 over num_heads 2"),
        ({"top_k": 9}, "top_k is 9 of 8 experts"),
        ({"num_experts": 1, "top_k": 1}, "num_experts is 1; use at least 2"),
        ({"dense_steps": 0}, "dense_steps is 0; use at least 1"),
        ({"split_noise": -0.1}, "split_noise is -0.1; use at least 0"),
        ({"decay_share": 1.5}, "decay_share is 1.5; use a share from 0 to 1"),
        ({"carry": "all"}, "carry is 'all'; use one of exact, asymmetric, none"),
        ({"rewarm_steps": 5}, "rewarm_steps is 5 with carry 'exact'"),
        ({"carry": "asymmetric"}, "carry 'asymmetric' with rewarm_steps 0"),
        ({"width_factor": 1, "new_layers": 0}, "the phase grown would not grow"),
    ],
)
def test_fails_a_config_that_fits_no_model(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        changed(laptop(), **wrong)
