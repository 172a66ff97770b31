"""The doctor against the embedded AWS; botocore stubs where it lacks the API."""

import itertools
import json
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.stub import Stubber

from rehearsal.aws import EmbeddedAws
from stacks.doctor.__main__ import main

IMAGE = (
    "/aws/service/deeplearning/ami/x86_64/"
    "oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
)
BOOTSTRAP = "/cdk-bootstrap/hnb659fds/version"
Examine = Callable[..., dict[str, list[dict[str, str]]]]


class Clinic:
    """The embedded AWS, with answers of our own for the calls that it does not know."""

    def __init__(self, aws: EmbeddedAws) -> None:
        self.aws = aws
        # A text is AWS's default, in an account that never had another.
        self.quota: float | str = 64.0
        self.vpcs = 5.0
        self.scores: list[tuple[str, int]] = [("us-east-1a", 7), ("us-east-1b", 3)]
        self.denied: set[str] = set()

    def connect(self, _: str | None) -> tuple[Callable[[str], Any], str]:
        return self.client, self.aws.region

    def client(self, service: str) -> Any:
        if service in self.denied:
            client = unconnected(service)
            stub = Stubber(client)
            stub.add_client_error("list_roles", "AccessDenied", "no", http_status_code=403)
            stub.activate()
            return client
        if service == "service-quotas":
            return _Quotas(self)
        client = self.aws.client(service)
        return _Ec2(client, self._scores) if service == "ec2" else client

    def _scores(self, **asked: Any) -> dict[str, Any]:
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
            answer = {"Quota": {"Value": float(self._clinic.quota)}}
            stub.add_response("get_aws_default_service_quota", answer, asked)
            return client.get_aws_default_service_quota(**asked)


class _Ec2:
    """EC2 of the embedded AWS, which has no placement scores."""

    def __init__(self, client: Any, scores: Callable[..., Any]) -> None:
        self._client = client
        self.get_spot_placement_scores = scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        running.client("s3").create_bucket(Bucket="my-data")
        yield running


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


def upload(clinic: Clinic, gib: int) -> None:
    files = [{"name": "clips.npy", "bytes": gib * 2**30}]
    clinic.aws.client("s3").put_object(
        Bucket="my-data",
        Key="trajectory/manifest.json",
        Body=json.dumps({"files": files}).encode(),
    )


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Examine:
    """Return a function that gives the findings by check, and holds the exit code to them."""

    def run(clinic: Clinic, *options: str) -> dict[str, list[dict[str, str]]]:
        context = [each for option in options for each in ("-c", option)]
        code = main(["--json", "-c", "dataset_bucket=my-data", *context], clinic.connect)
        findings = json.loads(capsys.readouterr().out)
        assert code == any(each["state"] == "problem" for each in findings)
        by_check: dict[str, list[dict[str, str]]] = {}
        for each in findings:
            by_check.setdefault(each["check"], []).append(each)
        return by_check

    return run


def test_a_healthy_account_has_no_problem(healthy: Clinic, examine: Examine) -> None:
    found = examine(healthy, "alarm.email=me@example.com")
    states = {each["state"] for lines in found.values() for each in lines}
    # The alternates of a g5.2xlarge go up to 64 vCPUs.
    assert states == {"ok"}, found
    assert "account 123456789012 in us-east-1" in found["credentials"][0]["what"]
    assert "1 files, 10.0 GiB at s3://my-data/trajectory" in found["dataset"][0]["what"]


def test_a_bare_account_is_told_every_command(bare: Clinic, examine: Examine) -> None:
    bare.quota = 0.0
    found = examine(bare)
    fixes = {name: lines[0]["fix"] for name, lines in found.items() if lines[0]["fix"]}
    assert fixes["bootstrap"] == "npx cdk bootstrap aws://123456789012/us-east-1"
    assert [each["fix"] for each in found["service role"]] == [
        f"aws iam create-service-linked-role --aws-service-name {service}.amazonaws.com"
        for service in ("spotfleet", "spot")
    ]
    assert fixes["spot quota"].endswith(
        "--quota-code L-3819A6DF --desired-value 16 --region us-east-1"
    )
    assert fixes["dataset"].startswith("python -m training data upload DIR --dataset-uri s3://my-d")
    assert "alarm.email=" in fixes["alarm e-mail"]


def test_the_command_of_a_fix_fixes_it(bare: Clinic, examine: Examine) -> None:
    iam = bare.aws.client("iam")
    made = [
        iam.create_service_linked_role(AWSServiceName=line["fix"].rpartition(" ")[2])
        for line in examine(bare)["service role"]
    ]
    assert {each["state"] for each in examine(bare)["service role"]} == {"ok"}
    for each in made:
        iam.delete_role(RoleName=each["Role"]["RoleName"])


def test_a_quota_for_the_size_but_not_its_alternates_is_a_warning(
    healthy: Clinic, examine: Examine
) -> None:
    healthy.quota = 8.0
    (line,) = examine(healthy)["spot quota"]
    assert line["state"] == "warning"
    assert "too low for the alternates g5.4xlarge" in line["what"]


def test_a_quota_nobody_changed_is_awss_default(healthy: Clinic, examine: Examine) -> None:
    healthy.quota = "4"
    (line,) = examine(healthy)["spot quota"]
    assert (line["state"], line["what"]) == (
        "problem", "L-3819A6DF is 4 vCPUs; 1 x g5.2xlarge needs 8",
    )  # fmt: skip


def test_an_on_demand_base_asks_for_the_other_quota(healthy: Clinic, examine: Examine) -> None:
    found = examine(healthy, "on_demand_base=1")
    assert "L-DB2E81BA" in found["on-demand quota"][0]["what"]
    assert "spot quota" not in found
    assert "spot capacity" not in found


def test_a_deadline_needs_both_quotas(healthy: Clinic, examine: Examine) -> None:
    found = examine(healthy, "deadline_hours=24")
    assert "L-3819A6DF" in found["spot quota"][0]["what"]
    assert "L-DB2E81BA" in found["on-demand quota"][0]["what"]


def test_zones_without_the_size_are_a_problem(healthy: Clinic, examine: Examine) -> None:
    # g5 is offered in every zone of us-east-1 but e.
    (line,) = examine(healthy, "zones=us-east-1e")["size"]
    assert line["state"] == "problem"
    assert line["fix"].endswith("-c zones=us-east-1a,us-east-1b")
    (line,) = examine(healthy, "zones=us-east-1a,us-east-1e")["size"]
    assert line["state"] == "warning"
    assert "not offered in us-east-1e" in line["what"]


def test_a_low_score_is_a_warning_with_better_zones(healthy: Clinic, examine: Examine) -> None:
    healthy.scores = [("us-east-1a", 1), ("us-east-1c", 9), ("us-east-1d", 8)]
    (line,) = examine(healthy)["spot capacity"]
    assert line["state"] == "warning"
    assert line["fix"].endswith("-c zones=us-east-1c,us-east-1d")
    healthy.scores = [("us-east-1a", 2)]
    assert examine(healthy)["spot capacity"][0]["fix"].endswith("-c on_demand_base=1")


def test_an_image_that_is_not_there_is_a_problem(healthy: Clinic, examine: Examine) -> None:
    wrong = IMAGE.replace("2.12", "9.99")
    (line,) = examine(healthy, f"pytorch_ami_parameter={wrong}")["image"]
    assert (line["state"], line["what"]) == ("problem", f"us-east-1 has no parameter {wrong}")
    assert "get-parameters-by-path" in line["fix"]
    (line,) = examine(healthy, "pytorch_ami_parameter=ami-0123456789abcdef0")["image"]
    assert "is not available in us-east-1" in line["what"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("GPU PyTorch 2.7 (Ubuntu 22.04)", "the Python of Ubuntu 22.04 is too old"),
        ("GPU PyTorch 2.12 (Amazon Linux 2023)", "its root device is /dev/xvda, and the launch"),
    ],
)
def test_an_image_that_could_not_boot_is_a_problem(
    healthy: Clinic, examine: Examine, name: str, what: str
) -> None:
    images = healthy.aws.client("ec2").describe_images(
        Filters=[{"Name": "name", "Values": [f"*{name}*"]}]
    )["Images"]
    # An ami- id, as its name would be refused at synth.
    (line,) = examine(healthy, f"pytorch_ami_parameter={images[0]['ImageId']}")["image"]
    assert line["state"] == "problem"
    assert what in line["what"]
    assert "get-parameters-by-path" in line["fix"]


def test_a_dataset_larger_than_its_volume_is_a_problem(healthy: Clinic, examine: Examine) -> None:
    upload(healthy, 300)
    (line,) = examine(healthy)["dataset"]
    assert line["state"] == "problem"
    assert line["fix"].endswith("-c data_on=ebs -c data_volume.gib=331")


def test_a_manifest_that_is_none_is_a_problem(healthy: Clinic, examine: Examine) -> None:
    healthy.aws.client("s3").put_object(
        Bucket="my-data", Key="trajectory/manifest.json", Body=b"[]"
    )
    assert "is not a manifest" in examine(healthy)["dataset"][0]["what"]


def test_what_may_not_be_checked_is_a_problem(healthy: Clinic, examine: Examine) -> None:
    healthy.denied.add("iam")
    (line,) = examine(healthy)["service role"]
    assert "these credentials may not call ListRoles" in line["what"]
    # The rest was checked all the same.
    assert examine(healthy)["image"][0]["state"] == "ok"


def test_an_address_that_has_not_confirmed_is_a_problem(healthy: Clinic, examine: Examine) -> None:
    sns = healthy.aws.client("sns")
    topic = sns.create_topic(Name="alarms")["TopicArn"]
    template = {"Resources": {"T": {"Type": "AWS::SNS::Topic"}},
                "Outputs": {"TopicArn": {"Value": topic}}}  # fmt: skip
    healthy.aws.client("cloudformation").create_stack(
        StackName="TrainingStack", TemplateBody=json.dumps(template)
    )
    healthy.aws.client("cloudformation").get_waiter("stack_create_complete").wait(
        StackName="TrainingStack", WaiterConfig={"Delay": 1}
    )
    assert examine(healthy)["alarm e-mail"][0]["what"] == "the topic has no subscriber"
    sns.subscribe(TopicArn=topic, Protocol="email", Endpoint="me@example.com")
    (line,) = examine(healthy)["alarm e-mail"]
    # moto confirms at once; AWS says PendingConfirmation in place of the ARN.
    assert (line["state"], line["what"]) == ("ok", "me@example.com confirmed")
    assert examine(healthy)["stack TrainingStack"][0]["what"] == "CREATE_COMPLETE"
    healthy.aws.client("cloudformation").delete_stack(StackName="TrainingStack")


def test_a_region_without_room_for_a_network_is_a_problem(
    healthy: Clinic, examine: Examine
) -> None:
    healthy.vpcs = 1.0
    (line,) = examine(healthy)["network"]
    assert (line["state"], line["what"]) == (
        "problem",
        "1 of 1 VPCs are in use in us-east-1; -c vpc= takes one of them",
    )
    assert "--service-code vpc --quota-code L-F678F1CE" in line["fix"]


def test_an_existing_network_without_a_way_out_gets_it_by_the_fixes(
    healthy: Clinic, examine: Examine
) -> None:
    ec2 = healthy.aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/24", AvailabilityZone="us-east-1c")
    subnet_id = subnet["Subnet"]["SubnetId"]
    given = (f"vpc={vpc}", f"subnets={subnet_id}")
    found = examine(healthy, *given)
    # The zone that counts for the size is the subnet's; no room for another VPC is needed.
    assert found["size"][0]["what"].endswith("the subnets are in us-east-1c")
    lacking = [each["what"].split(" to ")[-1].split(":")[0] for each in found["network"]]
    assert lacking[1:] == ["ec2", "monitoring", "ssm", "ssmmessages"]
    assert "no gateway endpoint of S3" in lacking[0]
    assert {each["state"] for each in found["network"]} == {"problem"}
    for each in found["network"]:
        _create_endpoint(ec2, shlex.split(each["fix"]))
    (line,) = examine(healthy, *given)["network"]
    assert (line["state"], line["what"]) == (
        "ok", f"{subnet_id} of {vpc} reach AWS by endpoints, without an address",
    )  # fmt: skip
    ec2.modify_subnet_attribute(SubnetId=subnet_id, MapPublicIpOnLaunch={"Value": True})
    (line,) = examine(healthy, *given)["network"]
    assert line["state"] == "warning"
    assert "gives its machines public addresses, which max_usd does not count" in line["what"]
    (line,) = examine(healthy, given[0], "subnets=subnet-12345678")["network"]
    assert line["what"] == f"{vpc} in us-east-1 has no subnet-12345678"


def _create_endpoint(ec2: Any, words: list[str]) -> None:
    """Do what `aws ec2 create-vpc-endpoint` would."""

    def given(option: str) -> list[str]:
        after = words[words.index(option) + 1 :] if option in words else []
        return list(itertools.takewhile(lambda word: not word.startswith("--"), after))

    ec2.create_vpc_endpoint(
        VpcId=given("--vpc-id")[0],
        ServiceName=given("--service-name")[0],
        VpcEndpointType=(given("--vpc-endpoint-type") or ["Gateway"])[0],
        RouteTableIds=given("--route-table-ids"),
        SubnetIds=given("--subnet-ids"),
        PrivateDnsEnabled="--private-dns-enabled" in words,
    )


def test_with_nat_only_s3_needs_an_endpoint(healthy: Clinic, examine: Examine) -> None:
    ec2 = healthy.aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.8.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.8.0.0/24")["Subnet"]["SubnetId"]
    nat = ec2.create_nat_gateway(SubnetId=subnet)["NatGateway"]["NatGatewayId"]
    table = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])
    ec2.create_route(
        RouteTableId=table["RouteTables"][0]["RouteTableId"],
        DestinationCidrBlock="0.0.0.0/0",
        NatGatewayId=nat,
    )
    (line,) = examine(healthy, f"vpc={vpc}", f"subnets={subnet}")["network"]
    assert line["state"] == "warning"
    assert "NAT charges each GB" in line["what"]


def test_machines_of_other_stacks_use_up_the_quota(healthy: Clinic, examine: Examine) -> None:
    ec2 = healthy.aws.client("ec2")
    started = ec2.run_instances(
        ImageId=ec2.describe_images()["Images"][0]["ImageId"],
        InstanceType="g5.16xlarge",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[
            {"ResourceType": "instance", "Tags": [{"Key": "Stack", "Value": "Training-vision"}]}
        ],
    )["Instances"][0]["InstanceId"]
    (line,) = examine(healthy, "on_demand_base=1")["on-demand quota"]
    assert line["state"] == "warning"
    assert line["what"].endswith("other machines of the account have 64: the run waits for one of "
                                 "them to end")  # fmt: skip
    assert "--desired-value 80" in line["fix"]
    # Its own machine ends before the next one starts.
    assert (
        examine(healthy, "on_demand_base=1", "name=vision")["on-demand quota"][0]["state"] == "ok"
    )
    assert examine(healthy)["spot quota"][0]["state"] == "ok"
    ec2.terminate_instances(InstanceIds=[started])


def test_a_key_that_spot_may_not_use_is_fixed_by_grants(healthy: Clinic, examine: Examine) -> None:
    kms = healthy.aws.client("kms")
    key = kms.create_key()["KeyMetadata"]
    lines = examine(healthy, f"kms={key['Arn']}")["key"]
    assert ["Client.InternalError" in each["what"] for each in lines] == [True, True, False]
    for each in lines[:2]:
        words = shlex.split(each["fix"])
        options = words[words.index("--operations") + 1 : words.index("--grantee-principal")]
        principal = words[words.index("--grantee-principal") + 1]
        kms.create_grant(KeyId=key["Arn"], GranteePrincipal=principal, Operations=options)
    (line,) = examine(healthy, f"kms={key['Arn']}")["key"]
    assert "alarms would be lost" in line["what"]
    policy = {"Statement": [{"Principal": {"Service": "cloudwatch.amazonaws.com"}}]}
    kms.put_key_policy(KeyId=key["Arn"], PolicyName="default", Policy=json.dumps(policy))
    assert examine(healthy, f"kms={key['Arn']}")["key"][0]["state"] == "ok"
    kms.disable_key(KeyId=key["KeyId"])
    assert "is Disabled" in examine(healthy, f"kms={key['Arn']}")["key"][0]["what"]


def test_fails_without_credentials_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "Unable to locate credentials; nothing else was checked" in out
    assert "$ aws configure sso && aws sso login" in out


def test_fails_without_a_network_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    # Nobody listens on the discard port.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert main([]) == 1
    assert "cannot call AWS" in capsys.readouterr().out


def test_fails_for_a_context_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-c", "size=g5.huge"]) == 2
    assert "not in the instance catalogue" in capsys.readouterr().err
