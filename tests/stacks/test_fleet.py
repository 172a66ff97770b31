"""The Spot fleet: its kind, its sizes and subnets, its tags, and what it waits for."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from contract.stack_names import NEW_GROUP, ON_DEMAND_GROUP
from stacks.fleet import KINDS
from stacks.parameters import StackParameters
from tests.stack_names import TRAINING
from tests.stacks.templates import every, only


def _config(templates: dict[str, Any]) -> Any:
    fleet = only(templates["TrainingStack"], "AWS::EC2::SpotFleet")
    return fleet["SpotFleetRequestConfigData"]


@pytest.fixture(scope="module")
def request_config(templates: dict[str, Any]) -> Any:
    return _config(templates)


def test_what_knows_the_kind_of_fleet_is_one_file_of_the_templates_and_one_of_the_guard() -> None:
    words = re.compile(
        r"spot[-_]?fleet|EC2Spot|FleetRequestId|auto_?scaling|\"asg\"", re.IGNORECASE
    )
    folder = Path(__file__).parents[2] / "stacks"
    knowing = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if words.search(path.read_text(encoding="utf-8"))
    }
    assert knowing == {
        "fleet.py",
        "guard/fleet.py",
        # What a deploy names, and an account has to allow.
        "parameters/fields.py",
        "parameters/checks.py",
        "doctor/capacity.py",
        "doctor/network.py",
        "data_key.py",
    }


def test_the_fleet_replaces_what_it_loses(request_config: Any) -> None:
    assert request_config["Type"] == "maintain"
    assert request_config["AllocationStrategy"] == "priceCapacityOptimized"
    assert request_config["ReplaceUnhealthyInstances"] is True
    assert request_config["InstanceInterruptionBehavior"] == "terminate"
    # Else a fleet that is set to zero keeps its machine, which is billed.
    assert request_config["ExcessCapacityTerminationPolicy"] == "default"
    assert (request_config["TargetCapacity"], request_config["OnDemandTargetCapacity"]) == (1, 0)
    assert "SpotPrice" not in request_config


def test_the_fleet_has_no_end_date_that_each_synthesis_would_move(request_config: Any) -> None:
    assert not {"ValidFrom", "ValidUntil", "TerminateInstancesWithExpiration"} & set(request_config)


def test_every_size_is_tried_in_every_subnet(request_config: Any) -> None:
    (config,) = request_config["LaunchTemplateConfigs"]
    tried = {
        (each["InstanceType"], each["SubnetId"]["Fn::ImportValue"]) for each in config["Overrides"]
    }
    sizes, subnets = {size for size, _ in tried}, {subnet for _, subnet in tried}
    assert sizes == {"g5.2xlarge", "g5.4xlarge"}
    assert len(subnets) == 2
    assert len(tried) == len(config["Overrides"]) == 4


def test_a_diff_shows_sizes_prices_and_limits(templates: dict[str, Any]) -> None:
    outputs = templates["TrainingStack"]["Outputs"]
    assert outputs["Sizes"]["Value"].startswith(
        "g5.2xlarge, g5.4xlarge; the dearest, g5.4xlarge, costs $1.624 an hour on demand (1.3 times"
    )
    assert outputs["Limits"]["Value"].startswith("the Guard stops the run at ")


def test_no_size_in_the_fleet_costs_more_than_its_factor(synthesize: Callable[..., Any]) -> None:
    dear = synthesize(size="g5.xlarge", alternates_price_factor="5")
    (config,) = _config(dear)["LaunchTemplateConfigs"]
    # $4.096 an hour; g5.xlarge is $1.006.
    assert "g5.16xlarge" in {each["InstanceType"] for each in config["Overrides"]}
    only = StackParameters.for_size("g5.xlarge", alternates_price_factor="1").sizes
    assert only == ("g5.xlarge",)


def test_the_template_version_is_explicit(request_config: Any) -> None:
    (config,) = request_config["LaunchTemplateConfigs"]
    version = config["LaunchTemplateSpecification"]["Version"]
    assert version["Fn::GetAtt"][1] == "LatestVersionNumber"


def test_the_fleet_carries_its_own_tags(request_config: Any) -> None:
    (specification,) = request_config["TagSpecifications"]
    assert specification["ResourceType"] == "spot-fleet-request"
    assert specification["Tags"] == [
        {"Key": "Stack", "Value": TRAINING},
        {"Key": "RunId", "Value": "run-1"},
    ]


def test_the_fleet_waits_for_role_and_guard(templates: dict[str, Any]) -> None:
    resources = templates["TrainingStack"]["Resources"]
    (fleet,) = [each for each in resources.values() if each["Type"] == "AWS::EC2::SpotFleet"]
    awaited = [resources[name]["Type"] for name in fleet["DependsOn"]]
    assert awaited.count("AWS::Lambda::Function") == 1
    roles = {
        name
        for policy in (resources[each] for each in fleet["DependsOn"])
        if policy["Type"] == "AWS::IAM::Policy"
        for name in (role["Ref"] for role in policy["Properties"]["Roles"])
    }
    assert len(roles) == 2, "the instance's and the Guard's policies"


def test_the_fleets_role_outlives_its_instances(templates: dict[str, Any]) -> None:
    resources = templates["TrainingStack"]["Resources"]
    (group,) = (e for e in resources.values() if e["Type"] == "AWS::EC2::SecurityGroup")
    (fleet,) = (e for e in resources.values() if e["Type"] == "AWS::EC2::SpotFleet")
    role = fleet["Properties"]["SpotFleetRequestConfigData"]["IamFleetRole"]["Fn::GetAtt"][0]
    # EC2 deletes no group of an instance, and CloudFormation no role before what depends on it.
    assert role in group["DependsOn"]
    # Nor the machine's own role, with which it saves while it shuts down.
    assert any(each.startswith("InstanceRole") for each in group["DependsOn"])


def test_the_fleets_id_is_published_after_the_fleet(templates: dict[str, Any]) -> None:
    parameters = every(templates["TrainingStack"], "AWS::SSM::Parameter")
    (parameter,) = [each for each in parameters if each["Name"] == f"/{TRAINING}/fleet-id"]
    assert parameter["Value"]["Ref"].startswith("Fleet")


GROUP = "AWS::AutoScaling::AutoScalingGroup"


@pytest.fixture(scope="module")
def groups(synthesize: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The group on Spot and the one on demand."""
    spot, other = every(synthesize(fleet="asg")["TrainingStack"], GROUP)
    if spot["AutoScalingGroupName"].endswith(ON_DEMAND_GROUP):
        spot, other = other, spot
    return spot, other


def test_a_group_of_each_market_has_the_same_pools_and_at_most_one_machine(
    groups: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    names = [each["AutoScalingGroupName"] for each in groups]
    assert names == [f"{TRAINING}-run-1", f"{TRAINING}-run-1{ON_DEMAND_GROUP}"]
    percent = "OnDemandPercentageAboveBaseCapacity"
    for group, share in zip(groups, (0, 100), strict=True):
        policy = group["MixedInstancesPolicy"]
        launch, distribution = policy["LaunchTemplate"], policy["InstancesDistribution"]
        sizes = [each["InstanceType"] for each in launch["Overrides"]]
        assert sizes == ["g5.2xlarge", "g5.4xlarge"]
        version = launch["LaunchTemplateSpecification"]["Version"]
        assert version["Fn::GetAtt"][1] == "LatestVersionNumber"
        assert (distribution["OnDemandBaseCapacity"], distribution[percent]) == (0, share)
        assert distribution["SpotAllocationStrategy"] == "price-capacity-optimized"
        assert len(group["VPCZoneIdentifier"]) == 2
        (collected,) = group["MetricsCollection"]
        # Of which FleetBelowTarget is made.
        names = {"GroupDesiredCapacity", "GroupInServiceInstances", "GroupMinSize"}
        assert names == set(collected["Metrics"])
        tags = {each["Key"]: (each["Value"], each["PropagateAtLaunch"]) for each in group["Tags"]}
        assert tags == {"Stack": (TRAINING, True), "RunId": ("run-1", True)}


def test_no_group_ends_a_healthy_machine_or_waits_in_a_deploy(
    groups: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    for group, most in zip(groups, (str(NEW_GROUP), "1"), strict=True):
        assert (group["MinSize"], group["MaxSize"], group["HealthCheckType"]) == ("0", most, "EC2")
        assert group["CapacityRebalance"] is False
        assert not {
            "DesiredCapacity", "MaxInstanceLifetime", "InstanceMaintenancePolicy",
            "LifecycleHookSpecificationList", "NewInstancesProtectedFromScaleIn",
        } & set(group)  # fmt: skip


def test_groups_need_no_role_and_an_event_starts_them(synthesize: Callable[..., Any]) -> None:
    resources = synthesize(fleet="asg")["TrainingStack"]["Resources"]
    assert not [name for name in resources if name.startswith("FleetRole")]
    (published,) = [
        each
        for each in resources.values()
        if each["Type"] == "AWS::SSM::Parameter" and each["Properties"]["Name"].endswith("fleet-id")
    ]
    (rule,) = [name for name in published["DependsOn"] if resources[name]["Type"].endswith("Rule")
               and "Published" in name]  # fmt: skip
    pattern = resources[rule]["Properties"]["EventPattern"]
    assert pattern["detail"]["name"] == [published["Properties"]["Name"]]
    awaited = [resources[name]["Type"] for name in published["DependsOn"]]
    assert awaited.count(GROUP) == 2
    for each in resources.values():
        if each["Type"] == GROUP:
            assert "UpdatePolicy" not in each


@pytest.mark.parametrize(
    ("message", "is_a_persons"),
    [
        ("You have requested more vCPU capacity than your current vCPU limit of 0 allows", True),
        ("Max spot instance count exceeded. Launching EC2 instance failed.", True),
        ("You are not authorized to perform this operation.", True),
        ("Client.InternalError: Client error on launch", True),
        ("The security group 'sg-1' does not exist", True),
        ("Invalid IAM Instance Profile ARN", True),
        (
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted: The provided credentials do not "
            "have permission to create the service-linked role for EC2 Spot Instances.",
            True,
        ),
        ("There are not enough free addresses in subnet 'subnet-1'", True),
        ("Your request for accessing resources in this region is being validated", True),
        ("Your account is pending verification.", True),
        ("This account is currently blocked", True),
        ("There is no Spot capacity available that matches your request.", False),
    ],
)
def test_what_only_a_person_can_fix_is_a_fault_of_a_group(message: str, is_a_persons: bool) -> None:
    rules = [each["StatusMessage"] for each in KINDS["asg"].fault["details"]]
    wanted = [each["wildcard"] for rule in rules for each in rule]
    assert any(fnmatchcase(message, each) for each in wanted) == is_a_persons
    # EventBridge says "Rule is too complex" of four such wildcards, and takes three.
    assert max(map(len, rules)) == 3
    assert all("*" not in each[1:-1] for each in wanted)


def test_zones_and_sizes_follow_the_context(synthesize: Callable[..., Any]) -> None:
    templates = synthesize(size="g5.12xlarge", zones="us-east-1a,us-east-1c,us-east-1d")
    overrides = _config(templates)["LaunchTemplateConfigs"][0]["Overrides"]
    assert {each["InstanceType"] for each in overrides} == {"g5.12xlarge", "g5.24xlarge"}
    subnets = every(templates["NetworkStack"], "AWS::EC2::Subnet")
    assert [each["AvailabilityZone"] for each in subnets] == [
        "us-east-1a",
        "us-east-1c",
        "us-east-1d",
    ]
