"""What a demo does by default fits the workload that it trains."""

import pytest

from contract.grammar import parse_interval
from rehearsal.drill.interruptions import parse_interruption
from rehearsal.drill.workload import DEFAULTS, by_workload, defaults_of
from training.registry import WORKLOADS, load_workload
from training.workload import Train


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_known_workload_is_interrupted_in_stages_that_it_has_in_their_order(name: str) -> None:
    workload = load_workload(name)
    stages = workload.stages(workload.recipes["laptop"]())
    order = [stage.name for stage in stages]
    planned = [parse_interruption(text) for text in DEFAULTS[name].interruptions]
    places = [order.index(each.stage) for each in planned]
    assert len(places) == 3 and places == sorted(places)
    for each, place in zip(planned, places, strict=True):
        stage = stages[place]
        if isinstance(stage, Train) and stage.settings.steps is not None:
            assert each.after < stage.settings.steps
    assert parse_interval(DEFAULTS[name].checkpoint_interval).value > 0


def test_a_workload_of_one_s_own_is_not_interrupted_unless_told_where() -> None:
    assert defaults_of("moons:MOONS").interruptions == ()
    shown = "default: 900 for trajectory, 12000 for growth, 1200 for imagenet, 60 for detection"
    assert by_workload("count") == shown
