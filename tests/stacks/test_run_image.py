"""The stack that keeps a run's image: its template is its name's, and never another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aws_cdk import App, DefaultStackSynthesizer, Stack, Tags

from stacks import TrainingStack, training_stack
from stacks.parameters import StackParameters
from stacks.run_image import RunImageStack
from tests.stack_names import named
from tests.stacks.templates import only

Synthesize = Callable[..., Any]
NEWEST = (
    "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04"
    "/latest/ami-id"
)
NAME = "RunImage-run-1-02012aed"


def keepers(templates: Any) -> dict[str, Any]:
    return {name: each for name, each in templates.items() if name.startswith("RunImage-")}


# A deploy of another template reads the parameter again, and CloudFormation refuses it while a run
# is on the old image: this text, and the name, are those of all runs that there are.
@pytest.mark.parametrize(
    "context",
    [
        {},
        {"tags.team": "vision", "size": "g6.xlarge", "kms": "create", "alarm.disk_percent": "80"},
        {"name": "vision", "run_id": "run-1", "target_capacity": "0"},
    ],
    ids=["defaults", "everything else changed", "another stack"],
)
def test_the_template_of_a_run_is_always_the_same(
    context: dict[str, str], synthesize: Synthesize
) -> None:
    assert keepers(synthesize(**context)) == {
        NAME: {
            "Description": "The image of one run, as its first deploy found it.",
            "Resources": {
                "RunImage": {
                    "Type": "AWS::SSM::Parameter",
                    "Properties": {"Type": "String", "Value": f"{{{{resolve:ssm:{NEWEST}}}}}"},
                    "Metadata": {"aws:cdk:path": f"{NAME}/RunImage"},
                }
            },
            "Outputs": {
                "Image": {
                    "Value": {"Fn::GetAtt": ["RunImage", "Value"]},
                    "Export": {"Name": named(NAME)},
                }
            },
        }
    }


def test_machines_start_what_their_run_keeps(templates: Any) -> None:
    data = only(templates["TrainingStack"], "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]
    assert data["ImageId"] == {"Fn::ImportValue": named(NAME)}
    # Nothing that the training stack's own deploy would read again.
    (parameter,) = templates["TrainingStack"]["Parameters"]
    assert parameter == "BootstrapVersion"
    assert "resolve:ssm" not in str(templates["TrainingStack"])


def test_a_run_or_a_line_of_images_has_its_own_stack() -> None:
    line = NEWEST.replace("2.12", "2.11")
    contexts = ({}, {"run_id": "a_b"}, {"run_id": "a-b"}, {"pytorch_ami_parameter": line})
    names = [StackParameters.for_size("g5.xlarge", **each).image_stack for each in contexts]
    assert names[0] == NAME
    assert len(set(names)) == len(names)
    assert all("_" not in name for name in names)


def test_an_id_needs_no_stack(synthesize: Synthesize) -> None:
    assert not keepers(synthesize(pytorch_ami_parameter="ami-0123456789abcdef0"))


def test_it_has_the_training_stack_s_synthesizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An importing app may name a bootstrap's qualifier stack by stack."""

    class Made(Exception):
        pass

    def make(*_: Any, **given: Any) -> None:
        raise Made(given)

    monkeypatch.setattr(training_stack, "RunImageStack", make)
    team = DefaultStackSynthesizer(qualifier="team")
    with pytest.raises(Made) as made:
        TrainingStack(
            App(), "Vision", parameters=StackParameters.for_size("g5.xlarge"), synthesizer=team,
            dataset_bucket_name="data-b", run_bucket_name="run-b", key_arn="", vpc_id="vpc-1",
            subnet_ids=["subnet-1"],
        )  # fmt: skip
    assert made.value.args[0]["synthesizer"] is team


def test_in_an_importing_app_it_has_the_app_s_roles_and_none_of_its_tags(tmp_path: Path) -> None:
    """There CDK's flag explicitStackTags may be off, and the bootstrap have another qualifier.

    Versions are reported, too, by default: of Python, of CDK.
    """
    team = DefaultStackSynthesizer(qualifier="team")
    app = App(outdir=str(tmp_path), default_stack_synthesizer=team, analytics_reporting=True)
    Tags.of(app).add("team", "vision")
    Stack(app, "Another")
    RunImageStack(app, NAME, newest_by=NEWEST)
    app.synth()
    artifacts = json.loads((tmp_path / "manifest.json").read_text())["artifacts"]
    another, own = (artifacts[name]["properties"] for name in ("Another", NAME))
    assert another["tags"] == {"team": "vision"} and not own.get("tags")
    role = "cloudFormationExecutionRoleArn"
    assert own[role] == another[role] and "cdk-team-" in own[role]
    template = json.loads((tmp_path / f"{NAME}.template.json").read_text())
    assert not {"Rules", "Parameters", "Conditions"} & template.keys()
    assert [*template["Resources"]] == ["RunImage"]
