"""The project's own stacks through the real CLI: deployed, changed, destroyed, adopted, guarded."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from moto.ec2.models import ec2_backends
from moto.ssm.models import ssm_backends

from embedded_aws import EmbeddedAws
from embedded_aws.cloudformation import schema
from embedded_aws.event_bus import EventBus
from rehearsal.machines.metadata import Credentials, MetadataServer, RehearsedInstance
from rehearsal.machines.process import ProcessMachine
from tests.embedded_aws.cdk_cli import NEVER, REPOSITORY, Cli
from tests.machine_key import machine_key
from tests.stack_names import DATASET, PREFIX, TRAINING, named

pytestmark = pytest.mark.slow
PROTECTED = ("-c", "kms=create", "-c", "access_logs=true", "-c", "alarm.email=me@example.org")


def outputs(aws: EmbeddedAws, stack: str) -> dict[str, str]:
    (found,) = aws.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
    return {each["OutputKey"]: each["OutputValue"] for each in found["Outputs"]}


def physical_ids(aws: EmbeddedAws, stack: str) -> dict[str, str]:
    found = aws.client("cloudformation").describe_stack_resources(StackName=stack)
    return {
        each["LogicalResourceId"]: each["PhysicalResourceId"] for each in found["StackResources"]
    }


def fleet_config(aws: EmbeddedAws, fleet: str) -> Any:
    found = aws.client("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=[fleet])
    return found["SpotFleetRequestConfigs"][0]["SpotFleetRequestConfig"]


def stacks_of(aws: EmbeddedAws) -> set[str]:
    return {each["StackName"] for each in aws.client("cloudformation").describe_stacks()["Stacks"]}


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as embedded:
        yield embedded


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_change_of_size_is_shown_first_and_replaces_at_most_the_fleet(
    aws: EmbeddedAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_place: bool
) -> None:
    if is_in_place:
        monkeypatch.setattr(schema, "IN_PLACE", {"AWS::EC2::SpotFleet"})
    cli = Cli(aws, tmp_path)
    cli.run("bootstrap", app=False)
    cli.run("deploy", "TrainingStack", *NEVER, *PROTECTED, app=False)
    assert aws.engine.missing_resources(["CDKToolkit", DATASET, TRAINING]) == []
    before = {name: physical_ids(aws, name) for name in (DATASET, TRAINING)}
    fleet = outputs(aws, TRAINING)["FleetIdOutput"]
    (running,) = aws.client("ec2").describe_spot_fleet_instances(SpotFleetRequestId=fleet)[
        "ActiveInstances"
    ]

    size = ("-c", "size=g5.12xlarge")
    shown = cli.run("diff", "TrainingStack", *PROTECTED, *size, app=False)
    assert "[~] AWS::EC2::SpotFleet" in shown
    assert "[~] AWS::EC2::LaunchTemplate" in shown
    assert "g5.12xlarge" in shown
    assert "AWS::S3::Bucket" not in shown
    is_replacing = "may be replaced" in shown or "requires replacement" in shown
    assert is_replacing != is_in_place

    cli.run("deploy", "TrainingStack", *NEVER, *PROTECTED, *size, app=False)
    after = {name: physical_ids(aws, name) for name in before}
    others = {
        logical_id
        for stack, ids in before.items()
        for logical_id, physical_id in ids.items()
        if after[stack][logical_id] != physical_id
    }
    fleet = outputs(aws, TRAINING)["FleetIdOutput"]
    assert sorted(re.sub(r"[0-9A-F]{8}$", "", each) for each in others) == (
        [] if is_in_place else ["FleetRequest"]
    )
    template = next(name for name in after[TRAINING].values() if name.startswith("lt-"))
    versions = aws.client("ec2").describe_launch_template_versions(LaunchTemplateId=template)
    assert sorted(each["VersionNumber"] for each in versions["LaunchTemplateVersions"]) == [1, 2]
    (launch,) = fleet_config(aws, fleet)["LaunchTemplateConfigs"]
    assert launch["LaunchTemplateSpecification"]["Version"] == "2"
    # A running trainer is left alone, or has a successor.
    (now,) = aws.client("ec2").describe_spot_fleet_instances(SpotFleetRequestId=fleet)[
        "ActiveInstances"
    ]
    assert (now == running) == is_in_place
    again = cli.run("diff", "TrainingStack", *PROTECTED, *size, app=False)
    assert "There were no differences" in again


def test_buckets_outlive_both_stacks_and_are_used_again(aws: EmbeddedAws, tmp_path: Path) -> None:
    cli, s3 = Cli(aws, tmp_path), aws.client("s3")
    cli.run("bootstrap", app=False)
    cli.run("deploy", "TrainingStack", *NEVER, "-c", "kms=create", app=False)
    kept = outputs(aws, DATASET)
    dataset, runs = kept["DatasetBucketName"], kept["RunBucketName"]
    s3.put_object(Bucket=dataset, Key="trajectory/manifest.json", Body=b"{}")
    s3.put_object(Bucket=runs, Key="runs/run-1/config.json", Body=b"kept")

    def content() -> bytes:
        body: bytes = s3.get_object(Bucket=runs, Key="runs/run-1/config.json")["Body"].read()
        return body

    cli.run("destroy", "TrainingStack", "--force", app=False)
    assert TRAINING not in stacks_of(aws)
    assert content() == b"kept"
    cli.run("deploy", "TrainingStack", *NEVER, "-c", "kms=create", app=False)
    assert outputs(aws, TRAINING)["RunUri"] == f"s3://{runs}/runs/run-1"
    cli.run("destroy", "TrainingStack", "--force", app=False)

    refused = cli.run("destroy", "DatasetStack", "--force", app=False, fails=True)
    assert "TerminationProtection" in refused or "termination protection" in refused
    key = next(iter(aws.client("kms").list_keys()["Keys"]))["KeyArn"]
    aws.client("cloudformation").update_termination_protection(
        StackName=DATASET, EnableTerminationProtection=False
    )
    cli.run("destroy", "DatasetStack", "--force", app=False)
    assert DATASET not in stacks_of(aws)
    assert content() == b"kept"

    adopting = (f"dataset_bucket={dataset}", f"run_bucket={runs}", f"kms={key}")
    context = [word for pair in adopting for word in ("-c", pair)]
    cli.run("deploy", "TrainingStack", *NEVER, *context, app=False)
    assert DATASET not in stacks_of(aws)
    adopted = outputs(aws, TRAINING)
    assert adopted["DatasetUri"] == f"s3://{dataset}/trajectory"
    assert adopted["RunUri"] == f"s3://{runs}/runs/run-1"
    assert content() == b"kept"


def publish_image(aws: EmbeddedAws) -> str:
    """Publish a new build of the default line, as AWS does about monthly; return its id."""
    name = json.loads((REPOSITORY / "cdk.json").read_text())["context"]["pytorch_ami_parameter"]
    builds = ssm_backends[aws.account][aws.region]._parameters[name]
    build = copy.copy(builds[-1])
    build.version += 1
    build.value = str(aws.client("ec2").register_image(Name=f"build {build.version}")["ImageId"])
    builds.append(build)
    return build.value


@dataclass(frozen=True)
class Running:
    """The one machine that runs, and its fleet."""

    fleet: str
    machine: str
    image: str


def running(aws: EmbeddedAws) -> Running:
    fleet = outputs(aws, TRAINING)["FleetIdOutput"]
    filters = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    (found,) = aws.client("ec2").describe_instances(Filters=filters)["Reservations"]
    (machine,) = found["Instances"]
    return Running(fleet, machine["InstanceId"], machine["ImageId"])


def test_a_run_keeps_the_image_of_its_first_deploy(aws: EmbeddedAws, tmp_path: Path) -> None:
    cli = Cli(aws, tmp_path)
    cli.run("bootstrap", app=False)

    def deploy(*options: str) -> Running:
        cli.run("deploy", "TrainingStack", *NEVER, *options, app=False)
        return running(aws)

    first = deploy()
    (keeper,) = [name for name in stacks_of(aws) if name.startswith(named("RunImage-run-1-"))]
    newest = publish_image(aws)
    assert deploy("-c", "alarm.disk_percent=80") == first

    # CloudFormation refuses what would move it, and a run whose image nobody has looked up.
    changed = (keeper.removeprefix(PREFIX), *NEVER, "--force", "--tags", "team=vision")
    refused = cli.run("deploy", *changed, app=False, fails=True)
    assert f"Export {keeper} cannot be updated as it is in use by {TRAINING}" in refused
    another = ("-c", "run_id=run_2")
    alone = ("TrainingStack", "--exclusively", *NEVER, *another)
    refused = cli.run("deploy", *alone, app=False, fails=True)
    assert f"No export named {named('RunImage-run-2-')}" in refused

    # Another run takes the newest; the first has its own again later, also after a destroy.
    assert deploy(*another).image == newest
    cli.run("destroy", "TrainingStack", "--force", app=False)
    assert deploy().image == first.image
    assert deploy("-c", f"pytorch_ami_parameter={newest}").image == newest


class Guarded:
    """A deployed stack whose Guard is woken by its own rules, with its deployed code."""

    def __init__(self, aws: EmbeddedAws, folder: Path) -> None:
        self.aws = aws
        self.folder = folder
        self.fleet = outputs(aws, TRAINING)["FleetIdOutput"]
        self.bucket = outputs(aws, DATASET)["RunBucketName"]

    def begin(self, case: int) -> str:
        """An empty run, and a fleet with one new instance; return the instance's id."""
        s3, ec2 = self.aws.client("s3"), self.aws.client("ec2")
        # With all versions: a head that was deleted is not one that never was.
        found = s3.list_object_versions(Bucket=self.bucket)
        for each in [*found.get("Versions", []), *found.get("DeleteMarkers", [])]:
            s3.delete_object(Bucket=self.bucket, Key=each["Key"], VersionId=each["VersionId"])
        self.set_capacity(0)
        running = self._running()
        if running:
            ec2.terminate_instances(InstanceIds=running)
        self._forget()
        # A base on demand has a capacity of its own, which must go to zero as well.
        self.set_capacity(1, on_demand=case % 2)
        (instance,) = self._running()
        self.code = self.folder / f"functions-{case}"
        return instance

    def set_capacity(self, target: int, on_demand: int = 0) -> None:
        self.aws.client("ec2").modify_spot_fleet_request(
            SpotFleetRequestId=self.fleet,
            TargetCapacity=target,
            OnDemandTargetCapacity=on_demand,
        )

    def put(self, name: str, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        extra = {"IfNoneMatch": "*"} if name == "head.json" else {}
        self.aws.client("s3").put_object(
            Bucket=self.bucket, Key=f"runs/run-1/{name}", Body=body, **extra
        )

    def launched_earlier(self, instance: str, **ago: float) -> None:
        """Move an instance's launch into the past."""
        found = ec2_backends[self.aws.account][self.aws.region].get_instance(instance)
        found.launch_time -= timedelta(**ago)

    def looked_earlier(self, minutes: float) -> None:
        """Move the Guard's first look into the past: no machine is silent before that."""
        key = {"Bucket": self.bucket, "Key": "runs/run-1/guard.json"}
        kept = json.loads(self.aws.client("s3").get_object(**key)["Body"].read())
        self.put("guard.json", kept | {"blind_until": kept["blind_until"] - 60 * minutes})

    def tick(self) -> dict[str, Any]:
        """Fire the Guard's clock; return what its function answered."""
        bus = EventBus(aws=self.aws, code_folder=self.code)
        bus.tick()
        bus.close()
        (invocation,) = bus.invocations
        assert invocation.error is None, invocation.error
        assert invocation.answer is not None
        return invocation.answer

    @property
    def capacity(self) -> tuple[int, int]:
        config = fleet_config(self.aws, self.fleet)
        return int(config["TargetCapacity"]), int(config.get("OnDemandTargetCapacity", 0))

    def _running(self) -> list[str]:
        filters = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        pages = self.aws.client("ec2").describe_instances(Filters=filters)["Reservations"]
        return [each["InstanceId"] for page in pages for each in page["Instances"]]

    def _forget(self) -> None:
        """EC2 shows terminated instances for an hour; a new case begins after that."""
        backend = ec2_backends[self.aws.account][self.aws.region]
        for reservation in backend.reservations.values():
            for instance in reservation.instances:
                if instance.state == "terminated":
                    instance.add_tags({"Stack": "forgotten"})


def test_the_guard_stops_a_run_for_each_of_its_reasons(aws: EmbeddedAws, tmp_path: Path) -> None:
    cli = Cli(aws, tmp_path / "cdk.out")
    cli.run("bootstrap", app=False)
    caps = ("max_hours=10", "guard.max_barren_attempts=2", "guard.heartbeat_timeout_seconds=2400")
    context = [word for pair in caps for word in ("-c", pair)]
    cli.run("deploy", "TrainingStack", *NEVER, *context, app=False)
    guarded = Guarded(aws, tmp_path)

    guarded.begin(0)
    guarded.put("head.json", {"format": 1, "state": "running", "checkpoints": []})
    assert guarded.tick()["action"] == "none"
    assert guarded.capacity == (1, 0)

    guarded.begin(1)
    guarded.put("head.json", {"format": 1, "state": "finished", "checkpoints": []})
    assert guarded.tick() == {"action": "to-zero", "reason": "the run is finished"}
    assert guarded.capacity == (0, 0)

    guarded.launched_earlier(guarded.begin(2), hours=11)
    guarded.put("head.json", {"format": 1, "state": "running", "checkpoints": []})
    answer = guarded.tick()
    assert answer == {"action": "to-zero", "reason": "11.0 hours billed; max_hours is 10"}
    assert guarded.capacity == (0, 0)

    instance = guarded.begin(3)
    for _ in range(2):
        aws.client("ec2").terminate_instances(InstanceIds=[instance])
        guarded.set_capacity(1)
        (instance,) = guarded._running()
    answer = guarded.tick()
    assert answer == {"action": "to-zero", "reason": "2 attempts in a row committed nothing"}
    assert guarded.capacity == (0, 0)

    # User data that cannot start at all leaves a machine that runs, costs, and says nothing.
    guarded.launched_earlier(guarded.begin(4), minutes=39)
    assert guarded.tick()["action"] == "none", "it might still be booting"
    instance = guarded.begin(5)
    guarded.launched_earlier(instance, minutes=41)
    guarded.tick()
    guarded.looked_earlier(minutes=41)
    machine = _broken_machine(aws, tmp_path / "machine", instance)
    try:
        assert not machine.wait(5, "[ok]")
        answer = guarded.tick()
    finally:
        machine.kill()
    assert answer["action"] == "to-zero, terminate"  # nothing of it would end it
    assert answer["reason"].startswith("no heartbeat for 24")
    assert guarded.capacity == (0, 0)


def _broken_machine(aws: EmbeddedAws, folder: Path, instance: str) -> ProcessMachine:
    machine = ProcessMachine(
        folder=folder,
        environment=aws.environment(),
        metadata=MetadataServer(
            instance=RehearsedInstance(id=instance, user_data=b"#!/no/such/interpreter\nexit 1\n"),
            credentials=Credentials(access_key_id=machine_key(aws)),
        ),
    )
    machine.start()
    return machine
