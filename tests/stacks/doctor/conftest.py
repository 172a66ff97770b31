"""An account for the doctor: the embedded AWS, and botocore's stubs where it lacks the API."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import boto3
import botocore.client
import pytest
from botocore.config import Config
from botocore.stub import Stubber

from contract.stack_names import description_of
from embedded_aws import EmbeddedAws
from stacks.doctor.__main__ import main
from tests.page_policies import action, allowed
from tests.stack_names import PREFIX
from tests.stacks.doctor.public_access import block_public_access

# Anybody may ask who they are; the fleet's dry run may be denied.
ALLOWED = allowed("deployer.md") | {"sts:GetCallerIdentity", "ec2:RequestSpotFleet"}
BOOTSTRAP = "/cdk-bootstrap/hnb659fds/version"
Examine = Callable[..., dict[str, list[dict[str, str]]]]


class Clinic:
    """The embedded AWS, with answers of our own for the calls that it does not know."""

    def __init__(self, aws: EmbeddedAws) -> None:
        self.aws = aws
        # A text is AWS's default, in an account that never had another.
        self.quota: float | str = 64.0
        self.vpcs: float | str = 5.0
        self.scores: list[tuple[str, int]] = [("us-east-1a", 7), ("us-east-1b", 3)]
        # What the policy simulator says of a denied call; None: it is denied too.
        self.iam_denied = False
        self.simulated: dict[str, Any] | None = None
        self.fleet_denied = ""
        self.default_key = "alias/aws/ebs"

    def connect(self, _: str | None) -> tuple[Callable[[str], Any], str]:
        return self.client, self.aws.region

    def client(self, service: str) -> Any:
        if service == "iam" and self.iam_denied:
            return self._denied_iam
        if service == "service-quotas":
            return _Quotas(self)
        client = self.aws.client(service)
        return _Ec2(client, self) if service == "ec2" else client

    @cached_property
    def _denied_iam(self) -> Any:
        client = unconnected("iam")
        stub = Stubber(client)
        for _ in range(2):
            stub.add_client_error("list_roles", "AccessDenied", "no", http_status_code=403)
            if self.simulated is None:
                stub.add_client_error("get_user", "AccessDenied", "no", http_status_code=403)
                continue
            arn = "arn:aws:iam::123456789012:user/ada"
            user = {"Arn": arn, "UserName": "ada", "UserId": "AIDA" * 4, "Path": "/"}
            stub.add_response("get_user", {"User": user | {"CreateDate": "2026-01-01"}})
            result = {"EvalActionName": "iam:ListRoles", **self.simulated}
            stub.add_response("simulate_principal_policy", {"EvaluationResults": [result]})
        stub.activate()
        return client

    def scores_asked(self, **asked: Any) -> dict[str, Any]:
        assert asked["SingleAvailabilityZone"] is True
        zones = self.aws.client("ec2").describe_availability_zones()["AvailabilityZones"]
        ids = {each["ZoneName"]: each["ZoneId"] for each in zones}
        client = kept("ec2")
        with Stubber(client) as stub:
            scores = [
                {"Region": self.aws.region, "AvailabilityZoneId": ids[zone], "Score": score}
                for zone, score in self.scores
            ]
            stub.add_response("get_spot_placement_scores", {"SpotPlacementScores": scores})
            answer: dict[str, Any] = client.get_spot_placement_scores(**asked)
            return answer


def unconnected(service: str) -> Any:
    """A client for a stub."""
    session = boto3.session.Session(
        aws_access_key_id="x", aws_secret_access_key="y", region_name="us-east-1"
    )
    return session.client(service, config=Config(retries={"max_attempts": 1}))


# EC2's takes half a second to make.
kept = cache(unconnected)


class _Quotas:
    """Service Quotas, of which the embedded AWS knows no values."""

    def __init__(self, clinic: Clinic) -> None:
        self._clinic = clinic

    def get_service_quota(self, **asked: str) -> Any:
        value = self._clinic.vpcs if asked["ServiceCode"] == "vpc" else self._clinic.quota
        client = kept("service-quotas")
        with Stubber(client) as stub:
            if isinstance(value, str):
                stub.add_client_error("get_service_quota", "NoSuchResourceException", "none")
            else:
                stub.add_response("get_service_quota", {"Quota": {"Value": value}}, asked)
            return client.get_service_quota(**asked)

    def get_aws_default_service_quota(self, **asked: str) -> Any:
        client = kept("service-quotas")
        with Stubber(client) as stub:
            is_vpc = asked["ServiceCode"] == "vpc"
            value = self._clinic.vpcs if is_vpc else self._clinic.quota
            answer = {"Quota": {"Value": float(value)}}
            stub.add_response("get_aws_default_service_quota", answer, asked)
            return client.get_aws_default_service_quota(**asked)


class _Ec2:
    """EC2 of the embedded AWS, which has no placement scores, and no organization above it."""

    def __init__(self, client: Any, clinic: Clinic) -> None:
        self._client = client
        self._clinic = clinic
        self.get_spot_placement_scores = clinic.scores_asked

    def get_ebs_default_kms_key_id(self) -> Any:
        client = kept("ec2")
        with Stubber(client) as stub:
            answer = {"KmsKeyId": self._clinic.default_key}
            stub.add_response("get_ebs_default_kms_key_id", answer, {})
            return client.get_ebs_default_kms_key_id()

    def request_spot_fleet(self, **asked: Any) -> Any:
        if not self._clinic.fleet_denied:
            return self._client.request_spot_fleet(**asked)
        client = kept("ec2")
        with Stubber(client) as stub:
            stub.add_client_error(
                "request_spot_fleet", "UnauthorizedOperation", self._clinic.fleet_denied
            )
            return client.request_spot_fleet(**asked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        running.client("s3").create_bucket(Bucket="my-data")
        yield running


@pytest.fixture(autouse=True)
def public_access(monkeypatch: pytest.MonkeyPatch) -> None:
    block_public_access(monkeypatch, "off")


@pytest.fixture
def bare(aws: EmbeddedAws) -> Clinic:
    """An account that nobody has prepared; its bucket is empty."""
    return Clinic(aws)


@pytest.fixture
def healthy(aws: EmbeddedAws) -> Iterator[Clinic]:
    """An account in which everything is as it should be, before the first deploy."""
    iam, ssm = aws.client("iam"), aws.client("ssm")
    roles = [
        iam.create_service_linked_role(AWSServiceName=service)["Role"]["RoleName"]
        for service in ("spotfleet.amazonaws.com", "spot.amazonaws.com")
    ]
    ssm.put_parameter(Name=BOOTSTRAP, Value="30", Type="String")
    clinic = Clinic(aws)
    upload(clinic, 10)
    yield clinic
    for role in roles:
        iam.delete_role(RoleName=role)
    ssm.delete_parameter(Name=BOOTSTRAP)
    aws.client("s3").delete_object(Bucket="my-data", Key="trajectory/manifest.json")


@contextmanager
def deployed(
    clinic: Clinic,
    construct_id: str = "TrainingStack",
    prefix: str = PREFIX,
    description: str = "",
    **outputs: str,
) -> Iterator[None]:
    """Deploy a stack that has nothing but these outputs, and the description of ours."""
    cloudformation, stack = clinic.aws.client("cloudformation"), f"{prefix}{construct_id}"
    template = {
        "Description": description or description_of(construct_id),
        "Resources": {"T": {"Type": "AWS::SNS::Topic"}},
        "Outputs": {name: {"Value": value} for name, value in outputs.items()},
    }
    cloudformation.create_stack(StackName=stack, TemplateBody=json.dumps(template))
    cloudformation.get_waiter("stack_create_complete").wait(
        StackName=stack, WaiterConfig={"Delay": 1}
    )
    try:
        yield
    finally:
        cloudformation.delete_stack(StackName=stack)
        cloudformation.get_waiter("stack_delete_complete").wait(
            StackName=stack, WaiterConfig={"Delay": 1}
        )


@contextmanager
def bootstrapped_with(clinic: Clinic, key: str, name: str) -> Iterator[None]:
    """Deploy what the doctor reads of the stack of `cdk bootstrap --bootstrap-kms-key-id KEY`."""
    cloudformation = clinic.aws.client("cloudformation")
    given = {"FileAssetsBucketKmsKeyId": key, "Qualifier": "hnb659fds"}
    template = {
        "Parameters": {each: {"Type": "String"} for each in given},
        "Resources": {"T": {"Type": "AWS::SNS::Topic"}},
    }
    cloudformation.create_stack(
        StackName=name,
        TemplateBody=json.dumps(template),
        Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in given.items()],
    )
    cloudformation.get_waiter("stack_create_complete").wait(
        StackName=name, WaiterConfig={"Delay": 1}
    )
    yield
    cloudformation.delete_stack(StackName=name)
    cloudformation.get_waiter("stack_delete_complete").wait(
        StackName=name, WaiterConfig={"Delay": 1}
    )


def upload(clinic: Clinic, gib: int) -> None:
    files = [{"name": "clips.npy", "bytes": gib * 2**30}]
    clinic.aws.client("s3").put_object(
        Bucket="my-data",
        Key="trajectory/manifest.json",
        Body=json.dumps({"files": files}).encode(),
    )


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Return a function that gives the findings by check, and holds the exit code to them.

    Every call that it makes is in the deployer's policy.
    """
    call = botocore.client.BaseClient._make_api_call

    def checked(self: Any, operation: str, *arguments: Any) -> Any:
        assert action(self, operation) in ALLOWED
        return call(self, operation, *arguments)

    def run(clinic: Clinic, *options: str) -> dict[str, list[dict[str, str]]]:
        context = [each for option in options for each in ("-c", option)]
        with monkeypatch.context() as patch:
            patch.setattr(botocore.client.BaseClient, "_make_api_call", checked)
            code = main(["--json", "-c", "dataset_bucket=my-data", *context], clinic.connect)
        findings = json.loads(capsys.readouterr().out)
        assert code == any(each["state"] == "problem" for each in findings)
        by_check: dict[str, list[dict[str, str]]] = {}
        for each in findings:
            by_check.setdefault(each["check"], []).append(each)
        return by_check

    return run
