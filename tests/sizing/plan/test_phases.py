"""A stage whose images grow: its time is the sum of its resolutions, and each has its own limit."""

from pathlib import Path

import pytest

from sizing.plan.plan_inputs import Request
from sizing.plan.size_plan import Plan, make_plan
from tests.sizing.sample_plan import plan

PHASES = [
    {"name": "32 pixels", "epochs": 6, "work": 0.25},
    {"name": "64 pixels", "epochs": 4, "work": 1.0},
]


def imagenet(size: str, recipe: str = "epochs_16") -> Plan:
    return make_plan(Request(workload="imagenet", recipe=recipe, size=size))


def test_the_time_of_a_stage_is_the_sum_of_its_phases(tmp_path: Path) -> None:
    for name in ("whole", "phases"):
        (tmp_path / name).mkdir()
    whole = plan(tmp_path / "whole").work.main
    main = plan(tmp_path / "phases", footprint={"phases": PHASES, "evaluation_work": 2.0}).work.main
    small, large = main.phases
    assert main.step.seconds == large.step.seconds == whole.step.seconds
    assert small.step.compute + small.step.traffic == pytest.approx(
        (large.step.compute + large.step.traffic) / 4
    )
    assert main.evaluation_seconds == pytest.approx(2 * whole.evaluation_seconds)
    assert main.seconds == pytest.approx(small.seconds + large.seconds + main.evaluation_seconds)
    assert main.epoch_seconds == pytest.approx((small.seconds + large.seconds) / 10)
    assert small.seconds + large.seconds < whole.seconds
    assert main.memory == whole.memory


def test_a_stage_without_phases_is_one(tmp_path: Path) -> None:
    main = plan(tmp_path).work.main
    assert [phase.phase.epochs for phase in main.phases] == [10]
    assert main.seconds == pytest.approx(10 * main.epoch_seconds + main.evaluation_seconds)
    assert main.seconds_low <= main.seconds <= main.seconds_high


def test_other_epochs_keep_the_phases_shares(tmp_path: Path) -> None:
    main = plan(tmp_path, footprint={"phases": PHASES}, epochs=20).work.main
    assert [phase.phase.epochs for phase in main.phases] == [12, 8]


def test_each_progressive_recipe_of_imagenet_adds_its_resolutions_up() -> None:
    for recipe, epochs in (("epochs_16", 16), ("epochs_40", 40), ("epochs_88", 88)):
        main = imagenet("g5.4xlarge", recipe).work.main
        assert sum(phase.phase.epochs for phase in main.phases) == epochs
        names = [phase.phase.name for phase in main.phases]
        assert (names[0], names[-1]) == ("160 pixels", "192 pixels")
        # The published runs' A10G hours: 6.4, 15.3 and 33.2, by the A100's; ours are modelled.
        assert 0.5 < main.seconds / 3600 / (0.39 * epochs) < 1


@pytest.mark.parametrize(
    ("size", "recipe", "bound_by"),
    [
        ("g5.xlarge", "full", "loader CPU"),
        ("g5.2xlarge", "full", "GPU memory bandwidth"),
        ("g5.2xlarge", "epochs_16", "disk"),
        ("g5.4xlarge", "epochs_16", "GPU memory bandwidth"),
    ],
)
def test_a_plan_names_the_bottleneck_of_each_size(size: str, recipe: str, bound_by: str) -> None:
    assert imagenet(size, recipe).work.main.bound_by == bound_by
