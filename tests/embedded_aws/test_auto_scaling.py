"""Auto Scaling groups: they launch, replace, shrink and change their market as AWS documents it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from embedded_aws import Course, EmbeddedAws
from embedded_aws.iam.evaluation import ApiCall
from tests.embedded_aws.fleets import RUNNING, Fleets

ON_SPOT = {
    "OnDemandPercentageAboveBaseCapacity": 0,
    "SpotAllocationStrategy": "price-capacity-optimized",
}
NAMES = iter(f"Training-run.{number}" for number in range(1000))


class Groups:
    """One group and what it did, on an AWS of its own capacity."""

    def __init__(self, aws: EmbeddedAws, fleets: Fleets) -> None:
        self.aws, self.fleets, self.name = aws, fleets, next(NAMES)
        self.client, self.ec2 = aws.client("autoscaling"), aws.client("ec2")

    def create(self, desired: int = 1, **more: Any) -> None:
        version = {"LaunchTemplateId": self.fleets.template, "Version": "1"}
        overrides = [{"InstanceType": size} for size in ("g5.2xlarge", "g5.xlarge")]
        template = {"LaunchTemplateSpecification": version, "Overrides": overrides}
        given = {
            "MinSize": 0,
            "MaxSize": 3,
            "DesiredCapacity": desired,
            "VPCZoneIdentifier": ",".join(self.fleets.subnets),
            "MixedInstancesPolicy": {
                "LaunchTemplate": template,
                "InstancesDistribution": ON_SPOT,
            },
            "Tags": [{"Key": "RunId", "Value": "r", "PropagateAtLaunch": True}],
        }
        self.client.create_auto_scaling_group(AutoScalingGroupName=self.name, **(given | more))

    def update(self, **changes: Any) -> None:
        self.client.update_auto_scaling_group(AutoScalingGroupName=self.name, **changes)

    def described(self) -> dict[str, Any]:
        (found,) = self.client.describe_auto_scaling_groups(AutoScalingGroupNames=[self.name])[
            "AutoScalingGroups"
        ]
        return dict(found)

    def instances(self) -> list[dict[str, Any]]:
        """What runs, oldest first, as EC2 describes it."""
        tag = {"Name": "tag:aws:autoscaling:groupName", "Values": [self.name]}
        found = self.ec2.describe_instances(Filters=[tag, *RUNNING])["Reservations"]
        return [item for reservation in found for item in reservation["Instances"]]

    def markets(self) -> list[str]:
        return [each.get("InstanceLifecycle", "on-demand") for each in self.instances()]

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Let time pass; the types and details of the group's events since the last time."""
        return [
            (kind, detail)
            for source, kind, detail, _ in self.aws.maintain_fleets()
            if source == "aws.autoscaling" and detail["AutoScalingGroupName"] == self.name
        ]

    def power_on(self) -> str:
        """Switch its only machine on, so that it takes time to shut down."""
        (found,) = self.instances()
        self.aws.capacity.powered.add(found["InstanceId"])
        return str(found["InstanceId"])


@pytest.fixture
def group(aws: EmbeddedAws, fleets: Fleets) -> Iterator[Groups]:
    aws.capacity.reset()
    yield Groups(aws, fleets)
    aws.capacity.notice_seconds = 0.0
    for each in aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]:
        which = {"AutoScalingGroupName": each["AutoScalingGroupName"]}
        aws.client("autoscaling").delete_auto_scaling_group(**which, ForceDelete=True)


def test_it_launches_per_pool_tags_what_it_starts_and_says_so(group: Groups) -> None:
    group.aws.capacity.follow([Course(size="g5.2xlarge", usd_per_hour=2.0)])
    group.create()
    (found,) = group.instances()
    tags = {each["Key"]: each["Value"] for each in found["Tags"]}
    assert (found["InstanceType"], found["InstanceLifecycle"]) == ("g5.xlarge", "spot")
    assert (tags["RunId"], tags["Stack"]) == ("r", "S")
    described = group.described()
    (member,) = described["Instances"]
    assert (member["InstanceId"], member["LifecycleState"]) == (found["InstanceId"], "InService")
    assert described["AutoScalingGroupARN"].endswith(f":autoScalingGroupName/{group.name}")
    ((kind, detail),) = group.events()
    assert kind == "EC2 Instance Launch Successful"
    assert (detail["EC2InstanceId"], detail["StatusCode"]) == (found["InstanceId"], "InProgress")
    assert set(detail["Details"]) == {"Availability Zone", "Subnet ID"}
    (activity,) = group.client.describe_scaling_activities(AutoScalingGroupName=group.name)[
        "Activities"
    ]
    assert (activity["StatusCode"], activity["Progress"]) == ("Successful", 100)


@pytest.mark.parametrize("way", ["terminate_instances", "stop_instances"])
def test_it_replaces_a_machine_that_ec2_no_longer_runs(group: Groups, way: str) -> None:
    group.create()
    lost = group.power_on()
    group.events()
    getattr(group.ec2, way)(InstanceIds=[lost])
    launched = [detail["EC2InstanceId"] for _, detail in group.events()]
    assert launched == [each["InstanceId"] for each in group.instances()] != [lost]
    states = {each["InstanceId"]: each["LifecycleState"] for each in group.described()["Instances"]}
    assert states[lost] == "Terminating"
    group.aws.power_off(lost)
    ((kind, detail),) = group.events()
    assert (kind, detail["EC2InstanceId"]) == ("EC2 Instance Terminate Successful", lost)
    assert "EC2 health check indicating it has been terminated or stopped" in detail["Cause"]


def test_it_ends_a_machine_that_is_too_much_at_once_and_without_a_notice(group: Groups) -> None:
    group.aws.capacity.notice_seconds = 120.0
    group.create()
    ended = group.power_on()
    group.update(MinSize=0, MaxSize=0, DesiredCapacity=0)
    assert ended not in group.aws.capacity.endings
    (found,) = group.ec2.describe_instances(InstanceIds=[ended])["Reservations"][0]["Instances"]
    assert found["State"]["Name"] == "shutting-down"
    assert found["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    with pytest.raises(ClientError, match=r"\(ScalingActivityInProgress\)"):
        group.client.delete_auto_scaling_group(AutoScalingGroupName=group.name)
    group.aws.power_off(ended)
    group.client.delete_auto_scaling_group(AutoScalingGroupName=group.name)


@pytest.mark.parametrize("rebalances", [False, True])
def test_spot_takes_a_machine_with_its_notice_and_the_group_replaces_it(
    group: Groups, rebalances: bool
) -> None:
    group.create(CapacityRebalance=rebalances)
    taken, capacity = group.power_on(), group.aws.capacity
    capacity.at_risk.add(taken)
    group.events()
    assert len(group.instances()) == 1 + rebalances, "a recommendation alone replaces nothing"
    if rebalances:
        group.events()
        assert [each["InstanceId"] for each in group.instances()] != [taken]
        return
    capacity.notice_seconds = 120.0
    capacity.end(taken, "taken", has_notice=True)
    capacity.notice_seconds = 0.0
    group.events()
    assert [each["InstanceId"] for each in group.instances()] == [taken]
    capacity.end(taken, "taken", has_notice=True)
    group.events()
    (other,) = group.instances()
    (found,) = group.ec2.describe_instances(InstanceIds=[taken])["Reservations"][0]["Instances"]
    assert found["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert other["InstanceId"] != taken


def test_a_new_on_demand_base_launches_first_and_then_ends_the_other(group: Groups) -> None:
    group.create()
    for base, market in ((1, "on-demand"), (0, "spot")):
        (before,) = group.instances()
        distribution = ON_SPOT | {"OnDemandBaseCapacity": base}
        group.update(MixedInstancesPolicy={"InstancesDistribution": distribution})
        assert group.markets() == [before.get("InstanceLifecycle", "on-demand"), market]
        group.events()
        assert group.markets() == [market]
    # What an update leaves out takes its default: all above the base is on demand.
    group.update(MixedInstancesPolicy={"InstancesDistribution": {"OnDemandBaseCapacity": 0}})
    group.events()
    assert group.markets() == ["on-demand"]


def test_without_capacity_it_says_so_now_and_then_and_launches_once_there_is_some(
    group: Groups,
) -> None:
    group.aws.capacity.follow([Course(steps=((0, 0),))])
    group.create()
    ((kind, detail),) = group.events()
    assert (kind, detail["StatusCode"]) == ("EC2 Instance Launch Unsuccessful", "Failed")
    assert "There is no Spot capacity available" in detail["StatusMessage"]
    assert group.events() == []
    group.aws.capacity.reset()
    assert [kind for kind, _ in group.events()] == ["EC2 Instance Launch Successful"]


def test_launches_that_failed_for_a_day_are_suspended_until_somebody_resumes_them(
    group: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.aws.capacity.follow([Course(steps=((0, 0),))])
    group.create()
    real = group.aws.capacity.clock
    monkeypatch.setattr(group.aws.capacity, "clock", lambda: real() + 24 * 3600 + 1)
    group.events()
    group.aws.capacity.reset()
    assert group.events() == [] == group.instances()
    (process,) = group.described()["SuspendedProcesses"]
    assert process["ProcessName"] == "Launch"
    assert not process["SuspensionReason"].startswith("User suspended")
    which = {"AutoScalingGroupName": group.name, "ScalingProcesses": ["Launch"]}
    group.client.resume_processes(**which)
    assert (len(group.instances()), group.described()["SuspendedProcesses"]) == (1, [])
    group.client.suspend_processes(**which)
    (process,) = group.described()["SuspendedProcesses"]
    assert process["SuspensionReason"].startswith("User suspended")


def test_pools_are_shared_with_spot_fleets(group: Groups) -> None:
    group.aws.capacity.follow([Course(steps=((0, 1),), size="g5.*", zone="*a"),
                               Course(steps=((0, 0),), size="*", zone="*b")])  # fmt: skip
    fleet = group.fleets.request(LaunchTemplateConfigs=group.fleets.configs(size="g5.xlarge"))
    assert len(group.fleets.instances(fleet)) == 1
    group.create(desired=2)
    assert [each["InstanceType"] for each in group.instances()] == ["g5.2xlarge"]


def test_a_volume_whose_key_forbids_the_groups_role_fails_the_launch(group: Groups) -> None:
    own = {"Effect": "Allow", "Principal": {"AWS": f"arn:aws:iam::{group.aws.account}:root"}}
    policy = json.dumps({"Statement": {**own, "Action": "kms:*", "Resource": "*"}})
    key = group.aws.client("kms").create_key(Policy=policy)["KeyMetadata"]["Arn"]
    device = {"DeviceName": "sdf", "Ebs": {"VolumeSize": 8, "Encrypted": True, "KmsKeyId": key}}
    group.fleets.template = group.ec2.create_launch_template(
        LaunchTemplateName=f"encrypted-{group.name}",
        LaunchTemplateData=group.fleets.data | {"BlockDeviceMappings": [device]},
    )["LaunchTemplate"]["LaunchTemplateId"]
    group.create()
    ((kind, detail),) = group.events()
    assert kind == "EC2 Instance Launch Unsuccessful"
    assert detail["StatusMessage"].endswith("Client.InternalError: Client error on launch")
    assert group.instances() == group.described()["Instances"] == []


def test_a_detached_machine_runs_on_without_its_group(group: Groups) -> None:
    group.create()
    (found,) = group.instances()
    group.client.detach_instances(
        AutoScalingGroupName=group.name,
        InstanceIds=[found["InstanceId"]],
        ShouldDecrementDesiredCapacity=True,
    )
    assert (group.described()["DesiredCapacity"], group.instances()) == (0, [])
    (left,) = group.ec2.describe_instances(InstanceIds=[found["InstanceId"]])["Reservations"]
    assert left["Instances"][0]["State"]["Name"] == "running"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"MaxSize": 0}, "ValidationError.*Desired capacity:1 must be between"),
        ({"AutoScalingGroupName": "a:b"}, "ValidationError.*autoScalingGroupName"),
        (
            {"MixedInstancesPolicy": {"LaunchTemplate": {"LaunchTemplateSpecification": {
                "LaunchTemplateId": "lt-00000000000000000", "Version": "1"}}}},
            "ValidationError.*You must use a valid fully-formed launch template",
        ),
    ],
)  # fmt: skip
def test_it_refuses_what_aws_refuses(group: Groups, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ClientError, match=error):
        group.client.create_auto_scaling_group(
            **{"AutoScalingGroupName": group.name, "MinSize": 0, "MaxSize": 1,
               "DesiredCapacity": 1, "VPCZoneIdentifier": group.fleets.subnets[0], **changes}
        )  # fmt: skip


def test_it_refuses_calls_about_groups_that_do_not_allow_them(group: Groups) -> None:
    with pytest.raises(ClientError, match=r"ValidationError.*name not found"):
        group.update(MaxSize=1)
    group.create()
    with pytest.raises(ClientError, match=r"\(AlreadyExists\)"):
        group.create()
    with pytest.raises(ClientError, match=r"\(ValidationError\).*min size:0 and max size:3"):
        group.update(DesiredCapacity=4)
    with pytest.raises(ClientError, match=r"\(ResourceInUse\)"):
        group.client.delete_auto_scaling_group(AutoScalingGroupName=group.name)
    ended = group.power_on()
    group.client.delete_auto_scaling_group(AutoScalingGroupName=group.name, ForceDelete=True)
    assert group.described()["Status"] == "Delete in progress"
    with pytest.raises(ClientError, match=r"\(ScalingActivityInProgress\)"):
        group.update(MaxSize=1)
    group.aws.power_off(ended)
    found = group.client.describe_auto_scaling_groups(AutoScalingGroupNames=[group.name])
    assert found["AutoScalingGroups"] == []


def test_sizes_drag_the_desired_capacity_along(group: Groups) -> None:
    group.create(desired=2)
    group.update(MaxSize=1)
    assert (group.described()["DesiredCapacity"], len(group.instances())) == (1, 1)
    group.client.set_desired_capacity(AutoScalingGroupName=group.name, DesiredCapacity=0)
    assert group.instances() == []
    group.update(MinSize=1)
    assert (group.described()["DesiredCapacity"], len(group.instances())) == (1, 1)


def test_iam_knows_a_group_by_its_tags_and_a_request_by_its_sizes(group: Groups) -> None:
    group.create(desired=0)
    arn = f"arn:aws:autoscaling:{group.aws.region}:{group.aws.account}:autoScalingGroup:*"
    one = ApiCall(
        action="autoscaling:UpdateAutoScalingGroup",
        resource=f"{arn}:autoScalingGroupName/{group.name}",
        keys={},
    )
    keys = group.aws.access._resource_keys(one)
    assert keys["aws:resourcetag/runid"] == keys["autoscaling:resourcetag/runid"] == "r"
