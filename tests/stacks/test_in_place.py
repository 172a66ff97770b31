"""Changes that a second deploy makes without replacing anything, held against AWS's own schemas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embedded_aws.cloudformation import schema
from embedded_aws.cloudformation.schema import changed_properties, replacing_paths

Synthesize = Callable[..., Any]
CHANGES = {
    "size": {"size": "g5.xlarge"},
    "many GPUs": {"size": "g5.12xlarge"},
    "family": {"size": "g6.2xlarge"},
    "volume": {"data_volume.gib": "400"},
    "instance store": {"data_on": "nvme"},
    "image": {"pytorch_ami_parameter": "ami-0123456789abcdef0"},
    "pools": {"mix_gpus": "true"},
    "base": {"on_demand_base": "1"},
    "zero": {"target_capacity": "0"},
    "alarms": {"alarm.disk_percent": "80", "alarm.email": "me@example.org"},
    "caps": {"max_hours": "5", "guard.max_barren_attempts": "2"},
}


def _pairs(before: Any, after: Any) -> list[tuple[str, str, Any, Any]]:
    """Resource, type, and its properties on both sides, of all that both have and that differs."""
    found = []
    for stack in before.keys() & after.keys():
        old, new = before[stack]["Resources"], after[stack]["Resources"]
        for name in old.keys() & new.keys():
            sides = [side[name].get("Properties", {}) for side in (old, new)]
            if sides[0] != sides[1]:
                found.append((name, old[name]["Type"], *sides))
    return found


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_change_is_made_in_place_but_perhaps_in_the_fleet(
    change: str, synthesize: Synthesize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "IN_PLACE", {"AWS::EC2::SpotFleet"})
    before, after = synthesize(), synthesize(**CHANGES[change])
    pairs = _pairs(before, after)
    assert pairs, "the change changes something"
    for name, type_name, old, new in pairs:
        assert not replacing_paths(type_name, old, new), f"{name} would be replaced"
        # Nor may it depend on what only a deploy shows.
        assert {"Never"} == {each for _, each in changed_properties(type_name, old, new)}, name
    # A given image needs no stack that keeps the run's.
    for stack in before.keys() & after.keys():
        assert before[stack]["Resources"].keys() <= after[stack]["Resources"].keys()


@pytest.mark.parametrize(
    ("size", "more"),
    # Three of its four GPUs would be idle, which two alarms of their mean take into account.
    [("g5.4xlarge", set()), ("g5.12xlarge", {"AWS::CloudWatch::Alarm"})],
)
def test_a_change_of_size_touches_template_fleet_and_limits_only(
    size: str, more: set[str], synthesize: Synthesize
) -> None:
    before, after = synthesize(), synthesize(size=size)
    assert before["DatasetStack"] == after["DatasetStack"]
    assert {type_name for _, type_name, _, _ in _pairs(before, after)} == {
        "AWS::EC2::LaunchTemplate",
        "AWS::EC2::SpotFleet",
        # The Guard's limits in dollars.
        "AWS::Lambda::Function",
        *more,
    }


@pytest.mark.parametrize(
    ("kind", "type_name"),
    [("spot", "AWS::EC2::SpotFleet"), ("asg", "AWS::AutoScaling::AutoScalingGroup")],
)
def test_a_new_run_replaces_the_fleet_and_nothing_else(
    synthesize: Synthesize, kind: str, type_name: str
) -> None:
    pairs = _pairs(synthesize(fleet=kind), synthesize(fleet=kind, run_id="exp7"))
    assert {name for _, name, old, new in pairs if replacing_paths(name, old, new)} == {type_name}


@pytest.mark.parametrize("change", ["size", "pools", "base", "zero"])
def test_groups_change_in_place(change: str, synthesize: Synthesize) -> None:
    pairs = _pairs(synthesize(fleet="asg"), synthesize(fleet="asg", **CHANGES[change]))
    for name, type_name, old, new in pairs:
        assert not replacing_paths(type_name, old, new), f"{name} would be replaced"


def test_another_kind_of_fleet_comes_beside_the_old_one(synthesize: Synthesize) -> None:
    before, after = (
        synthesize(fleet=each)["TrainingStack"]["Resources"] for each in ("spot", "asg")
    )
    # No logical id changes its type, and what the old machine needs stays as long as its group.
    for name in before.keys() & after.keys():
        assert before[name]["Type"] == after[name]["Type"], name
    gone = {before[each]["Type"] for each in before.keys() - after.keys()}
    assert gone == {"AWS::EC2::SpotFleet", "AWS::IAM::Role"}


def test_a_new_run_takes_the_old_machine_nothing_before_it_has_ended(
    synthesize: Synthesize,
) -> None:
    before, after = (synthesize(run_id=each)["TrainingStack"]["Resources"] for each in "ab")
    (fleet,) = [name for name, each in before.items() if each["Type"] == "AWS::EC2::SpotFleet"]
    # CloudFormation deletes what a resource needs after the resource, and deletes nothing before
    # all that is new is there.
    assert before[fleet]["DependsOn"]
    groups = [name for name, each in before.items() if each["Type"] == "AWS::EC2::SecurityGroup"]
    (group,) = groups  # which EC2 does not delete while an instance is in it
    gone = before.keys() - after.keys()
    assert {before[each]["Type"].rpartition("::")[2] for each in gone} == {
        "Role", "Policy", "InstanceProfile", "SecurityGroup",
    }  # fmt: skip
    assert gone - {group} <= set(before[group]["DependsOn"])
    kept = [each for each in before.keys() & after.keys() if "InstanceRole" in each]
    assert kept == []


def test_new_code_leaves_fleet_and_launch_template_alone(
    synthesize: Synthesize, tmp_path: Path
) -> None:
    versions = []
    for number in "12":
        source = tmp_path / number / "mine"
        source.mkdir(parents=True)
        (source / "train.py").write_text(f"VERSION = {number}\n")
        program = {"program": "python train.py", "source": str(source)}
        versions.append(synthesize(workload="program", **program))
    pairs = _pairs(*versions)
    assert sorted(type_name for _, type_name, _, _ in pairs) == [
        "AWS::IAM::Policy",
        "AWS::SSM::Parameter",
    ]
