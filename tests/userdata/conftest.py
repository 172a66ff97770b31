"""A rig for each test on one embedded AWS."""

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from embedded_aws import EmbeddedAws
from tests.userdata.rig import Rig, make_bundle, wait


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    """An account with the three buckets and two bundles."""
    with EmbeddedAws() as embedded:
        s3 = embedded.client("s3")
        for bucket in ("runs", "datasets", "assets"):
            s3.create_bucket(Bucket=bucket)
        path = tmp_path_factory.mktemp("bundle") / "bundle.zip"
        for name, real_torch in (("bundle.zip", False), ("torch.zip", True)):
            content = make_bundle(path, real_torch=real_torch)
            s3.put_object(Bucket="assets", Key=name, Body=content)
        yield embedded


@pytest.fixture(scope="module")
def booted(aws: EmbeddedAws, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A rig with one machine whose trainer waits, for tests that only look."""
    with closing(make_rig(aws, tmp_path_factory.mktemp("booted"))) as rig:
        wait(rig.machine(), "trainer listens")
        yield rig


@pytest.fixture
def rig(aws: EmbeddedAws, tmp_path: Path) -> Iterator[Rig]:
    """A run and a fleet of its own; no machine outlives the test."""
    with closing(make_rig(aws, tmp_path)) as rig:
        yield rig


def make_rig(aws: EmbeddedAws, folder: Path) -> Rig:
    """Request a fleet and name it where machines look."""
    ec2 = aws.client("ec2")
    config = {
        "IamFleetRole": "arn:aws:iam::123456789012:role/fleet",
        "TargetCapacity": 1,
        "AllocationStrategy": "lowestPrice",
        "LaunchSpecifications": [
            {
                "ImageId": "ami-0123456789abcdef0",
                "InstanceType": "g5.xlarge",
                "SubnetId": ec2.describe_subnets()["Subnets"][0]["SubnetId"],
            }
        ],
    }
    fleet = ec2.request_spot_fleet(SpotFleetRequestConfig=config)["SpotFleetRequestId"]
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    parameter = f"/{run_id}/fleet-id"
    aws.client("ssm").put_parameter(Name=parameter, Value=fleet, Type="String")
    return Rig(aws=aws, folder=folder, run_id=run_id, fleet_id=fleet, parameter=parameter)
