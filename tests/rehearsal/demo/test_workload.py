"""What a demo does by default fits the workload that it trains."""

import dataclasses

import pytest

from contract.description import WorkloadDescription
from contract.grammar import parse_interval
from rehearsal.demo.action import parse_interruption
from rehearsal.demo.workload import DEFAULTS, by_workload, own_defaults
from training.registry import WORKLOADS, load_workload
from training.workload import Train


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_known_workload_is_interrupted_in_stages_that_it_has_in_their_order(name: str) -> None:
    workload = load_workload(name)
    stages = workload.stages(workload.recipes["laptop"]())
    order = [stage.name for stage in stages]
    planned = [parse_interruption(text) for text in DEFAULTS[name].interruptions]
    places = [order.index(each.stage) for each in planned]
    assert len(places) >= 2 and places == sorted(places)
    for each, place in zip(planned, places, strict=True):
        stage = stages[place]
        if isinstance(stage, Train) and stage.settings.steps is not None:
            assert int(each.at.partition(":")[2]) < stage.settings.steps
    assert parse_interval(DEFAULTS[name].checkpoint_interval).value > 0


def test_a_workload_of_one_s_own_loses_two_machines_in_its_last_stage() -> None:
    stages = {"first": 90, "last": 36}
    known = WorkloadDescription(recipe="full", stages=stages, num_samples=300, makes_data=True)
    assert own_defaults(known).interruptions == ("kill:last:12", "notice:last:24")
    assert own_defaults(known).count == 300
    unknown = dataclasses.replace(known, stages={"only": None}, num_samples=0)
    assert own_defaults(unknown).interruptions == ("kill:only:4", "notice:only:8")
    assert own_defaults(unknown).count == 1000


def test_the_count_of_each_known_workload_is_shown() -> None:
    shown = "default: 132 for trajectory, 12000 for growth, 1200 for imagenet, 60 for detection"
    assert by_workload("count") == shown
