"""Synthesized templates for the tests of stacks/: each variant once per session, cdk-nag on."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import app as cdk_app
from stacks.parameters import workloads

Template = dict[str, Any]
Synthesize = Callable[..., dict[str, Template]]
REPOSITORY = Path(__file__).parents[2]
DEFAULTS = json.loads((REPOSITORY / "cdk.json").read_text(encoding="utf-8"))["context"]


@pytest.fixture(scope="session")
def synthesize(tmp_path_factory: pytest.TempPathFactory) -> Synthesize:
    """Return a function from context to the templates by construct id."""

    @cache
    def synthesized(**context: object) -> dict[str, Template]:
        app = cdk_app.App(
            # As the CLI synthesizes: each resource says below which construct it is.
            context={**DEFAULTS, **context, "aws:cdk:enable-path-metadata": True},
            outdir=str(tmp_path_factory.mktemp("cdk.out")),
            # cfn-lint looks at the same templates in a test of its own.
            builtin_cloud_formation_validation=False,
        )
        cdk_app.build(app)
        cdk_app.Validations.of(app).add_plugins(cdk_app.AwsSolutionsChecks(app))
        assembly = app.synth()
        return {stack.id: stack.template for stack in assembly.stacks}

    return synthesized


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The registry has two lines on a workload, clips, that nobody has measured yet."""
    names = {**workloads.workloads(), "clips": "training.clips.workload:CLIPS"}
    recipes = {name: workloads.recipes(name) or ("full",) for name in names}
    monkeypatch.setattr(workloads, "REGISTRY", tmp_path / "registry.py")
    workloads.REGISTRY.write_text(f"WORKLOADS: dict = {names}\nRECIPES: dict = {recipes}\n")


@pytest.fixture(scope="session")
def templates(synthesize: Synthesize) -> dict[str, Template]:
    """All templates with the defaults of cdk.json."""
    return synthesize()


@pytest.fixture(scope="session")
def resources(templates: dict[str, Template]) -> dict[str, Any]:
    """All resources of all stacks; their logical ids do not collide."""
    return {
        name: each
        for template in templates.values()
        for name, each in template["Resources"].items()
    }


@pytest.fixture(scope="session")
def only(resources: dict[str, Any]) -> Callable[[str], Any]:
    """Return a function that gives the properties of the only resource of a type."""

    def properties(type_name: str) -> Any:
        (found,) = [each for each in resources.values() if each["Type"] == type_name]
        return found["Properties"]

    return properties
