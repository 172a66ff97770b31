"""Many stacks in one account: names of their own, one network, no more than a region allows."""

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from embedded_aws.cloudformation.schema import schema_of, tag_property
from tests.stacks.templates import every, only

PROVIDER = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
VPC = {"vpc": "vpc-0123456789abcdef0", "subnets": "subnet-12345678,subnet-87654321"}


@pytest.fixture(scope="module")
def vision(synthesize: Callable[..., Any]) -> Any:
    return synthesize(name="vision")


def _physical_names(template: Any) -> Iterator[str]:
    """The names that a template chooses, where AWS knows a resource by them."""
    for resource in template["Resources"].values():
        for pointer in (schema_of(resource["Type"]) or {}).get("primaryIdentifier", []):
            name = resource.get("Properties", {}).get(pointer.removeprefix("/properties/"))
            if isinstance(name, str):
                yield name
    for output in template["Outputs"].values():
        if "Export" in output:
            yield output["Export"]["Name"]


def test_two_stacks_share_no_physical_name(templates: Any, vision: Any) -> None:
    usual, named = templates["TrainingStack"], vision["Training-vision"]
    names = set(_physical_names(named))
    assert names == {
        "/SpotTraining-Training-vision/fleet-id",
        "/SpotTraining-Training-vision/bundle-uri",
        "/aws/events/SpotTraining-Training-vision",
    }
    assert not names & set(_physical_names(usual))
    # Nor a metric, a tag or a permission; nor, unless it is asked for, a run.
    assert "TrainingStack" not in json.dumps(named)
    assert "Training-vision" not in json.dumps(usual)
    runs = [each["Outputs"]["RunUri"]["Value"]["Fn::Join"][1][-1] for each in (usual, named)]
    assert runs == ["/runs/run-1", "/runs/vision-1"]


def test_no_run_changes_what_all_share(vision: Any, synthesize: Callable[..., Any]) -> None:
    another = synthesize(name="audio", size="g6.xlarge", run_id="exp7", target_capacity="0")
    for stack in ("DatasetStack", "NetworkStack"):
        assert vision[stack] == another[stack]


def test_a_network_is_exported_whether_or_not_a_stack_uses_it(vision: Any) -> None:
    exported = {
        output["Value"]["Ref"]
        for output in vision["NetworkStack"]["Outputs"].values()
        if "Export" in output
    }
    resources = vision["NetworkStack"]["Resources"]
    types = sorted(resources[name]["Type"] for name in exported)
    assert types == ["AWS::EC2::Subnet", "AWS::EC2::Subnet", "AWS::EC2::VPC"]


def test_eventbridge_may_write_to_the_record(resources: dict[str, Any]) -> None:
    """By the group's own policy, of which there is no limit; ten of the others fill a region."""
    (group,) = [each for each in every(resources, "AWS::Logs::LogGroup") if "LogGroupName" in each]
    (statement,) = group["ResourcePolicyDocument"]["Statement"]
    assert "events.amazonaws.com" in statement["Principal"]["Service"]
    assert str(statement["Resource"]).endswith(f":log-group:{group['LogGroupName']}:*']]}}")
    assert not every(resources, "AWS::Logs::ResourcePolicy")


def test_tags_reach_everything_that_takes_tags(synthesize: Callable[..., Any]) -> None:
    """AWS's schemas say what does; a launch template and a fleet tag by specifications."""
    templates = synthesize(**{"tags.cost:center": "42", "tags.Team": "see and hear"})
    wanted = {("cost:center", "42"), ("Team", "see and hear")}
    for stack, template in templates.items():
        for name, resource in template["Resources"].items():
            place = tag_property(resource["Type"])
            # A run keeps its image through a change of tags: its stack never changes.
            is_kept = stack.startswith("RunImage-")
            if is_kept or place is None or resource["Type"] == "AWS::EC2::LaunchTemplate":
                continue
            tags = resource["Properties"].get(place, [])
            found = tags.items() if isinstance(tags, dict) else map(_pair, tags)
            assert wanted <= set(found), (stack, name)
    template = only(templates["TrainingStack"], "AWS::EC2::LaunchTemplate")
    fleet = only(templates["TrainingStack"], "AWS::EC2::SpotFleet")
    specified = [
        *template["TagSpecifications"],
        *template["LaunchTemplateData"]["TagSpecifications"],
        *fleet["SpotFleetRequestConfigData"]["TagSpecifications"],
    ]
    kinds = {each["ResourceType"]: set(map(_pair, each["Tags"])) for each in specified}
    assert kinds.keys() == {"launch-template", "instance", "volume", "spot-fleet-request"}
    assert all(wanted <= tags for tags in kinds.values())


def _pair(tag: dict[str, str]) -> tuple[str, str]:
    return tag["Key"], tag["Value"]


def test_an_existing_network_is_used_without_an_address(synthesize: Callable[..., Any]) -> None:
    templates = synthesize(**VPC)
    assert set(templates) == {"DatasetStack", "RunImage-run-1-02012aed", "TrainingStack"}
    template = templates["TrainingStack"]
    assert only(template, "AWS::EC2::SecurityGroup")["VpcId"] == VPC["vpc"]
    config = only(template, "AWS::EC2::SpotFleet")["SpotFleetRequestConfigData"]
    overrides = config["LaunchTemplateConfigs"][0]["Overrides"]
    assert {each["SubnetId"] for each in overrides} == set(VPC["subnets"].split(","))
    costs = [
        float(guard["Environment"]["Variables"]["STORAGE_USD_PER_HOUR"])
        for each in (template, synthesize()["TrainingStack"])
        for guard in every(each, "AWS::Lambda::Function")
    ]
    # An address costs half a cent an hour.
    assert costs[1] - costs[0] == pytest.approx(0.005)


def test_two_teams_with_prefixes_share_no_physical_name(synthesize: Callable[..., Any]) -> None:
    asked = {
        "sweep.instances": "2",
        "review.repository": "me@1/mine@2",
        "review.oidc_provider": PROVIDER,
    }
    ours, theirs = synthesize(**asked), synthesize(prefix="VisionTeam-", **asked)
    assert ours.keys() == theirs.keys()
    for each in (ours, theirs):
        del each["TrainingStack"]["Outputs"]["DeployCommand"]  # which names the prefix
    for stack in ours:
        names = [set(_physical_names(each[stack])) for each in (ours, theirs)]
        assert not names[0] & names[1], stack
        # Resources keep their logical ids: only what a name begins with differs.
        assert json.dumps(theirs[stack]).replace("VisionTeam-", "SpotTraining-") == json.dumps(
            ours[stack]
        )
        assert "SpotTraining-" not in json.dumps(theirs[stack])
    before_there_was_a_prefix = synthesize(prefix="", **asked)
    assert set(_physical_names(before_there_was_a_prefix["TrainingStack"])) == {
        "/TrainingStack/fleet-id",
        "/TrainingStack/bundle-uri",
        "/aws/events/TrainingStack",
    }


def test_an_output_has_the_deploy_with_every_option(synthesize: Callable[..., Any]) -> None:
    """A second deploy that repeats one of them only would begin another run."""
    options = {"name": "vision", "overrides": "epochs=2 seed=3", "tags.a:b": "c d"}
    usual = {"size": "g5.2xlarge"}  # as in cdk.json
    stack = synthesize(**options, **usual, **{"train.keep": "4"})["Training-vision"]
    command = stack["Outputs"]["DeployCommand"]["Value"]
    assert command == (
        "npx cdk deploy Training-vision -c name=vision -c 'overrides=epochs=2 seed=3' "
        "-c 'tags.a:b=c d' -c train.keep=4"
    )
    given = dict(each.split("=", 1) for each in shlex.split(command)[5::2])
    again = synthesize(**given)["Training-vision"]
    assert again == stack
