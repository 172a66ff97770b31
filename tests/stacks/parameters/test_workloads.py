"""Names read from training's source are the names that training knows when it runs."""

from stacks.parameters.workloads import recipes, workloads
from training.registry import WORKLOADS, load_workload


def test_the_registry_is_read_as_training_has_it() -> None:
    assert workloads() == WORKLOADS


def test_every_workloads_recipes_are_read_as_training_has_them() -> None:
    for name in workloads():
        assert sorted(recipes(name)) == sorted(load_workload(name).recipes)
