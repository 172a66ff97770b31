"""A workload of one's own in a stack: imported and planned before anything is deployed."""

import json
from pathlib import Path
from typing import Any

import pytest
from aws_cdk import App, Stack
from aws_cdk.assertions import Annotations, Match

from contract.run_env import find_fault
from stacks.parameters import StackParameters
from stacks.parameters.checks import check_by_trainer
from stacks.parameters.workloads import recipes, workloads
from stacks.plan_at_synth import annotate
from stacks.program_source import write_source
from tests.stacks.templates import sample_run_env
from tests.training import documented
from training.registry import WORKLOADS, load_workload


def given(folder: Path, **others: Any) -> StackParameters:
    own = {"workload": "moons:MOONS", "recipe": "small", "source": str(folder), **others}
    return StackParameters.for_size("g5.xlarge", **own)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return documented.own_workload(tmp_path_factory.mktemp("own") / "mine")


@pytest.fixture(scope="module")
def parameters(source: Path) -> StackParameters:
    return given(source, overrides="epochs=8")


def test_it_is_planned_as_it_is_with_its_overrides(parameters: StackParameters) -> None:
    (plan,) = parameters.plans
    (stage,) = plan.work.stages
    assert (stage.footprint.stage, stage.footprint.epochs) == ("classify", 8)
    assert plan.spot is not None
    assert parameters.max_hours == 4, "the least: three times its plan is minutes"
    assert parameters.dataset == "mine"


def test_the_plan_is_annotated_like_that_of_a_known_workload(parameters: StackParameters) -> None:
    found = annotate(Stack(App(), "TrainingStack"), parameters)
    assert found is not None and found["workload"] == "moons:MOONS"


def test_the_bundle_has_its_source_and_run_env_names_it(
    source: Path, parameters: StackParameters, tmp_path: Path
) -> None:
    (source / "requirements.txt").write_text("einops\n")
    write_source(parameters, tmp_path)
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    own = {f"program/{name}" for name in ("source/moons.py", "source/requirements.txt")}
    assert there == own | {"program/requirements.txt"}
    variables = sample_run_env(parameters)
    assert (variables["WORKLOAD"], variables["RECIPE"]) == ("moons:MOONS", "small")
    assert [name for name, value in variables.items() if find_fault(name, value)] == []


def test_without_a_measurement_it_says_so_and_what_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    documented.own_workload(folder, "Moons.nominal_samples = {}")
    parameters = given(folder)
    assert parameters.plans == () and parameters.max_hours == 72
    stack = Stack(App(), "TrainingStack")
    assert annotate(stack, parameters) is None
    why = "no plan: .*its `nominal_samples` lack recipe 'small'.*; known are the price of an hour"
    Annotations.from_stack(stack).has_info("*", Match.string_like_regexp(why))


@pytest.mark.parametrize(
    ("context", "sentence"),
    [
        ({"source": ""}, "workload is 'moons:MOONS', whose code is on no machine; add source="),
        ({"source": "no/such"}, "source is 'no/such', which is not a folder"),
        ({"workload": "moons:MOONS()"}, r"module moons has no 'MOONS\(\)'; did you mean 'MOONS'"),
        ({"workload": "growth", "recipe": "full"}, "source is .*, which is for a program"),
        ({"overrides": "widht=3"}, "has no field 'widht'; did you mean 'width'"),
    ],
)
def test_fails_with_one_sentence(source: Path, context: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        given(source, **context)
    assert "\n" not in str(caught.value)


def test_a_known_workload_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stacks.parameters.checks.described", None)
    check_by_trainer(StackParameters.for_size("g5.xlarge"))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("epochz=3", "no field 'epochz'; did you mean 'epochs'"),
        ("epochs=x", "epochs='x' is not a valid int"),
    ],
)
def test_fails_for_a_known_workload_s_override_before_a_machine_does(
    override: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        StackParameters.for_size("g5.xlarge", overrides=override)


def test_an_app_without_torch_leaves_a_known_workload_s_overrides_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stacks.parameters.checks.find_spec", lambda _: None)
    assert StackParameters.for_size("g5.xlarge", overrides="epochz=3").overrides == ("epochz=3",)


def test_fails_for_a_dataset_with_fewer_images_than_a_step_before_a_machine_does(
    tmp_path: Path,
) -> None:
    """324 photographs passed: the machine refused them, after it was paid for."""
    manifest = tmp_path / "mani fest.json"
    meta = {"classes": ["a", "b"], "splits": {"train": 291, "validation": 33}}
    manifest.write_text(json.dumps({"files": [{"name": "a", "bytes": 1}], "meta": meta}))
    context = {"workload": "imagenet", "dataset_manifest": str(manifest)}
    sentence = "drop_last with 291 training samples leaves no step of 1024; pass --override global_"
    with pytest.raises(ValueError, match=sentence):
        StackParameters.for_size("g5.xlarge", **context)
    StackParameters.for_size("g5.xlarge", **context, overrides="global_batch=32 micro_batch=32")


def test_fails_for_overrides_that_do_not_fit_the_dataset_s_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    meta = {"classes": ["wall", "room", "door"], "most_objects": 400}
    manifest.write_text(json.dumps({"files": [{"name": "a", "bytes": 1}], "meta": meta}))
    context = {"workload": "detection", "dataset_manifest": str(manifest)}
    StackParameters.for_size("g5.xlarge", **context)
    context["overrides"] = "num_classes=2 num_queries=300"
    with pytest.raises(ValueError, match=r"override num_classes=3; also: .*num_queries=400"):
        StackParameters.for_size("g5.xlarge", **context)


def test_the_registry_is_read_as_training_has_it() -> None:
    assert workloads() == WORKLOADS
    for name in workloads():
        assert sorted(recipes(name)) == sorted(load_workload(name).recipes)
