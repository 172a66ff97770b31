"""The doctor against the embedded AWS; botocore stubs where it lacks the API."""

import json
import shlex
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from botocore.exceptions import ClientError

from contract.stack_names import SHARED_QUEUE
from stacks.doctor.__main__ import main
from tests.stacks.doctor.conftest import Clinic, Examine, deployed, upload

IMAGE = (
    "/aws/service/deeplearning/ami/x86_64/"
    "oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
)


def test_a_healthy_account_has_no_problem(healthy: Clinic, examine: Examine) -> None:
    everywhere = "zones=us-east-1a,us-east-1b,us-east-1c,us-east-1d,us-east-1f"
    found = examine(healthy, "alarm.email=me@example.com", everywhere, "run_bucket=my-data")
    del found["prices"]  # they age
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
    assert fixes["dataset"] == (
        "python -m training data make --workload trajectory --count 9000 --out data "
        "--dataset-uri s3://my-data/trajectory"
    )
    assert "alarm.email=" in fixes["alarm e-mail"]


def test_what_the_embedded_aws_does_not_have_is_no_problem(
    bare: Clinic, examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bare, "client", bare.aws.client)
    found = examine(bare, "workload=imagenet", "size=g5.xlarge")
    for check in ("quota", "spot capacity", "key"):
        (line,) = found[check]
        assert (line["state"], line["fix"]) == ("warning", "")
        assert line["what"].startswith("not checked: the AWS at this endpoint has no Get")
    drawing = "what nobody would draw is uploaded"
    assert found["dataset"][0]["fix"].startswith("python -m training data upload DIR"), drawing


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


def test_alternates_under_another_quota_are_measured_by_that_one(
    healthy: Clinic, examine: Examine
) -> None:
    healthy.quota = 8.0
    options = ("size=g6e.xlarge", "mix_gpus=true", "alternates_price_factor=30")
    g, p = examine(healthy, *options)["spot quota"]
    assert g["what"].startswith("L-3819A6DF is 8 vCPUs; 1 x g6e.xlarge needs 4; too low for")
    assert " p" not in g["what"].partition("alternates")[2]
    assert p["what"].startswith("L-C4BD4855 is 8 vCPUs; too low for the alternates p")
    assert "--quota-code L-C4BD4855 --desired-value " in p["fix"]
    assert {g["state"], p["state"]} == {"warning"}


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


def test_a_quota_of_which_sources_disagree_is_asked_by_its_code(
    healthy: Clinic, examine: Examine
) -> None:
    healthy.quota = 192.0
    found = examine(healthy, "size=p6-b200.48xlarge", "deadline_hours=24")
    # Service Quotas takes letters, digits and hyphens; the catalogue's doubt is a question mark.
    assert found["spot quota"][0]["what"].startswith("L-C4BD4855 is 192 vCPUs")
    assert found["on-demand quota"][0]["what"].startswith("L-417A185B is 192 vCPUs")


def test_zones_without_the_size_are_a_problem(healthy: Clinic, examine: Examine) -> None:
    # g5 is offered in every zone of us-east-1 but e.
    (line,) = examine(healthy, "zones=us-east-1e")["size"]
    assert line["state"] == "problem"
    # All that offer it.
    assert line["fix"].endswith("-c zones=us-east-1a,us-east-1b,us-east-1c,us-east-1d,us-east-1f")
    (line,) = examine(healthy, "zones=us-east-1a,us-east-1e")["size"]
    assert line["state"] == "warning"
    assert "not offered in us-east-1e" in line["what"]
    (line,) = examine(healthy)["size"]
    assert (line["state"], "Spot finds more in all of them" in line["what"]) == ("warning", True)


def test_zones_without_a_default_subnet_are_not_cloudformation_s(
    healthy: Clinic, examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A landing zone may delete default subnets; where none is left, all zones are taken."""

    def with_default_in(*zones: str) -> Callable[[str], Any]:
        def client(service: str) -> Any:
            found = Clinic.client(healthy, service)
            if service == "ec2":
                subnets = [{"AvailabilityZone": zone} for zone in zones]
                found.describe_subnets = lambda Filters: {"Subnets": subnets}
            return found

        return client

    for zones, state, words in (
        ((), "warning", "the subnets are in us-east-1a, us-east-1b;"),
        (("us-east-1d", "us-east-1c"), "warning", "the subnets are in us-east-1c, us-east-1d;"),
        (("us-east-1d",), "problem", "us-east-1d, the only zone with a default subnet"),
    ):
        monkeypatch.setattr(healthy, "client", with_default_in(*zones))
        (line,) = examine(healthy)["size"]
        assert line["state"] == state and words in line["what"]


@pytest.mark.parametrize(
    ("given", "sold", "fix"),
    [
        ("run_id=mine", "g5.4xlarge", "-c run_id=mine -c size=g5.4xlarge"),
        ("size=g5.xlarge", "g5.xlarge", "-c size=g5.xlarge -c alternates_price_factor=1"),
        ("mix_gpus=true", "g5.2xlarge", "-c mix_gpus=true -c mix_gpus=false"),
    ],
)
def test_a_size_that_the_region_lacks_is_replaced_by_a_deploy_of_the_same_options(
    healthy: Clinic,
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    sold: str,
    fix: str,
) -> None:
    client = healthy.client

    def lacks_it(service: str) -> Any:
        found = client(service)
        if service == "ec2":
            offers = {"InstanceType": sold, "Location": "us-east-1a"}
            found.describe_instance_type_offerings = lambda **_: {"InstanceTypeOfferings": [offers]}
        return found

    monkeypatch.setattr(healthy, "client", lacks_it)
    (line,) = examine(healthy, given)["size"]
    assert line["state"] == "problem"
    assert line["fix"] == f"npx cdk deploy TrainingStack -c dataset_bucket=my-data {fix}"


def test_zones_of_a_deployed_network_change_only_without_its_training_stack(
    healthy: Clinic, examine: Examine
) -> None:
    healthy.scores = [("us-east-1a", 1), ("us-east-1c", 9), ("us-east-1d", 8)]
    with deployed(healthy, "NetworkStack"), deployed(healthy):
        (line,) = examine(healthy, "size=g5.xlarge")["spot capacity"]
    options = "TrainingStack -c dataset_bucket=my-data -c size=g5.xlarge"
    assert line["fix"] == (
        f"npx cdk destroy {options} && npx cdk deploy {options} -c zones=us-east-1c,us-east-1d"
    )


def test_a_low_score_is_a_warning_with_better_zones(healthy: Clinic, examine: Examine) -> None:
    healthy.scores = [("us-east-1a", 1), ("us-east-1c", 9), ("us-east-1d", 8)]
    (line,) = examine(healthy, "size=g5.xlarge")["spot capacity"]
    assert line["state"] == "warning"
    assert line["fix"].endswith("-c zones=us-east-1c,us-east-1d")
    healthy.scores = [("us-east-1a", 2)]
    (line,) = examine(healthy, "size=g5.xlarge")["spot capacity"]
    assert line["fix"].endswith("-c on_demand_base=1")


def test_no_score_is_asked_where_ec2_would_say_a_low_one_in_any_case(
    healthy: Clinic, examine: Examine
) -> None:
    # The API of GetSpotPlacementScores: of one or two types it "will always be low".
    healthy.scores = [("us-east-1a", 1), ("us-east-1b", 1)]
    (line,) = examine(healthy, "size=g5.2xlarge")["spot capacity"]
    assert (line["state"], line["fix"]) == ("ok", "")
    assert "g5.2xlarge g5.4xlarge" in line["what"] and "low" in line["what"]


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
        ("GPU PyTorch 2.12 (Amazon Linux 2023)", "its root device is /dev/xvda, but the launch"),
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


def test_an_image_that_leaves_the_size_out_is_a_problem(healthy: Clinic, examine: Examine) -> None:
    ec2 = healthy.aws.client("ec2")
    says = "Supported EC2 instances: G4dn, G5, P4. Release notes: https://docs.aws.amazon.com/dlami"
    image = ec2.register_image(
        Name="Deep Learning AMI GPU PyTorch 2.12 (Ubuntu 24.04)", Description=says,
        RootDeviceName="/dev/sda1",
    )["ImageId"]  # fmt: skip
    for size, state in (("g5.2xlarge", "ok"), ("p4d.24xlarge", "ok"), ("g7e.2xlarge", "problem")):
        (line,) = examine(healthy, f"pytorch_ami_parameter={image}", f"size={size}")["image"]
        assert line["state"] == state, line
    assert "it says that it supports G4dn, G5, P4, not g7e" in line["what"]
    of_arm = ec2.describe_images(Filters=[{"Name": "architecture", "Values": ["arm64"]}])["Images"]
    (line,) = examine(healthy, f"pytorch_ami_parameter={of_arm[0]['ImageId']}")["image"]
    assert line["state"] == "problem"
    assert "it is for arm64, and all sizes here are x86_64" in line["what"]


def test_old_prices_are_renewed_by_the_command_of_their_row(
    healthy: Clinic, examine: Examine
) -> None:
    (line,) = examine(healthy)["prices"]
    assert line["state"] == "warning"
    assert "days old" in line["what"]
    assert line["fix"] == "python -m sizing catalogue g5.2xlarge --refresh --region us-east-1"


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


BOUNDARY, SCP = "PermissionsBoundaryDecisionDetail", "OrganizationsDecisionDetail"


@pytest.mark.parametrize(
    ("simulated", "state", "words"),
    [
        (None, "problem", "these credentials may not call iam:ListRoles"),
        ({"EvalDecision": "implicitDeny"}, "problem", "an identity-based policy would have to"),
        ({"EvalDecision": "allowed"}, "problem", "the resource's policy would have to allow"),
        (
            {"EvalDecision": "implicitDeny", BOUNDARY: {"AllowedByPermissionsBoundary": False}},
            "problem",
            "a permissions boundary would have to allow",
        ),
        (
            {"EvalDecision": "explicitDeny", SCP: {"AllowedByOrganizations": False}},
            "warning",
            "a service control policy would have to allow",
        ),
    ],
)
def test_what_may_not_be_checked_names_the_policy_by_the_simulator(
    healthy: Clinic,
    examine: Examine,
    simulated: dict[str, Any] | None,
    state: str,
    words: str,
) -> None:
    """Where the message does not say it, as in this one."""
    healthy.iam_denied, healthy.simulated = True, simulated
    found = examine(healthy)
    (line,) = found["service role"]
    assert line["state"] == state
    assert words in line["what"] and "(asked by Doctor of docs/deployer.md)" in line["what"]
    # The rest was checked all the same.
    assert found["image"][0]["state"] == "ok"


def test_an_address_that_has_not_confirmed_is_a_problem(healthy: Clinic, examine: Examine) -> None:
    sns = healthy.aws.client("sns")
    topic = sns.create_topic(Name="alarms")["TopicArn"]
    with deployed(healthy, TopicArn=topic):
        assert examine(healthy)["alarm e-mail"][0]["what"] == "the topic has no subscriber"
        sns.subscribe(TopicArn=topic, Protocol="email", Endpoint="me@example.com")
        (line,) = examine(healthy)["alarm e-mail"]
        # moto confirms at once; AWS says PendingConfirmation in place of the ARN.
        assert (line["state"], line["what"]) == ("ok", "me@example.com confirmed")
        assert examine(healthy)["stack SpotTraining-TrainingStack"][0]["what"] == "CREATE_COMPLETE"


@pytest.mark.parametrize("name", ["Queue", SHARED_QUEUE])
def test_shares_that_replace_a_queue_are_said_before_its_jobs_end(
    healthy: Clinic, examine: Examine, name: str
) -> None:
    queue = f"arn:aws:batch:us-east-1:123456789012:job-queue/{name}-1"
    with deployed(healthy, "SweepStack", SweepQueue=queue):
        for shares in ("", "a=1 b=2"):
            found = examine(healthy, "sweep.instances=4", f"sweep.shares={shares}")
            assert ("sweeps" in found) is (bool(shares) != (name == SHARED_QUEUE))
            for line in found.get("sweeps", ()):
                assert f"deletes {name}-1, and Batch ends its jobs" in line["what"]


def test_a_deploy_that_would_end_another_run_names_it(healthy: Clinic, examine: Examine) -> None:
    head = {"Bucket": "my-data", "Key": "runs/old/head.json"}
    with deployed(healthy, RunUri="s3://my-data/runs/old"):
        assert "run" not in examine(healthy, "run_id=old")
        for state in ("not begun", "running", "released"):
            if state != "not begun":
                body = json.dumps({"state": state}).encode()
                healthy.aws.client("s3").put_object(**head, Body=body)
            (line,) = examine(healthy, "run_id=new")["run"]
            assert line["state"] == "warning"
            assert f"the deploy starts new and ends old, which is {state}" in line["what"]
            assert "-c run_id=new -c run_id=old " in line["fix"]
        healthy.aws.client("s3").put_object(**head, Body=b'{"state": "finished"}')
        assert examine(healthy, "run_id=new")["run"][0]["state"] == "ok"
    own = "npx cdk deploy TrainingStack -c recipe=a -c run_id=old"
    healthy.aws.client("s3").delete_object(**head)
    with deployed(healthy, RunUri="s3://my-data/runs/old", DeployCommand=own):
        (line,) = examine(healthy, "run_id=new", "size=g5.4xlarge")["run"]
        assert line["fix"].startswith(f"{own}   #"), "not with the options of the new run"
    healthy.aws.client("s3").delete_object(**head)


@pytest.mark.parametrize(
    ("denied", "state", "words"),
    [
        ("with an explicit deny in a service control policy.", "problem", "CT.EC2.PV.6"),
        ("because no identity-based policy allows the action.", "ok", "CloudFormation makes"),
        ("Encoded authorization failure message: abc", "warning", "cannot tell who"),
    ],
)
def test_whoever_denies_the_fleet_is_named(
    healthy: Clinic, examine: Examine, denied: str, state: str, words: str
) -> None:
    healthy.fleet_denied = f"You are not authorized to perform: ec2:RequestSpotFleet {denied}"
    (line,) = examine(healthy)["fleet"]
    assert (line["state"], words in line["what"]) == (state, True)
    if state == "problem":  # the one command that works
        assert line["fix"].endswith(" -c fleet=asg")
        assert examine(healthy, "fleet=asg")["fleet"][0]["state"] == "ok"
    assert not healthy.aws.client("ec2").describe_spot_fleet_requests()["SpotFleetRequestConfigs"]


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
    others = examine(healthy, f"kms={key['Arn']}", "fleet=asg")["key"]
    assert "AWSServiceRoleForAutoScaling" in others[0]["what"]
    assert len(others) == 2
    allowed = {"Effect": "Allow", "Principal": {"Service": "cloudwatch.amazonaws.com"}}
    statements = [
        {**allowed, "Action": ["kms:Decrypt", "kms:GenerateDataKey*"], "Resource": "*"},
        {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "kms:*", "Resource": "*"},
    ]
    policy = {"Version": "2012-10-17", "Statement": statements}
    kms.put_key_policy(KeyId=key["Arn"], PolicyName="default", Policy=json.dumps(policy))
    assert examine(healthy, f"kms={key['Arn']}")["key"][0]["state"] == "ok"
    kms.disable_key(KeyId=key["KeyId"])
    (line,) = examine(healthy, f"kms={key['Arn']}")["key"]
    assert ("is Disabled" in line["what"], line["fix"].split()[2]) == (True, "enable-key")
    kms.schedule_key_deletion(KeyId=key["KeyId"])
    (line,) = examine(healthy, f"kms={key['Arn']}")["key"]
    # A key that is to be deleted cannot be enabled, and one that never was is not there to enable.
    assert line["fix"].startswith(f"aws kms cancel-key-deletion --key-id {key['Arn']} --region us-")
    assert " && aws kms enable-key --key-id " in line["fix"]
    other = key["Arn"].replace(key["KeyId"], str(UUID(int=7)))
    (line,) = examine(healthy, f"kms={other}")["key"]
    assert ("is missing" in line["what"], line["fix"].split()[2]) == (True, "list-keys")


def test_a_bucket_with_a_key_of_its_own_needs_that_key(healthy: Clinic, examine: Examine) -> None:
    """Each machine would be denied kms:Decrypt, and only once it runs."""
    s3, kms = healthy.aws.client("s3"), healthy.aws.client("kms")
    key = kms.create_key()["KeyMetadata"]["Arn"]
    body = s3.get_object(Bucket="my-data", Key="trajectory/manifest.json")["Body"].read()
    s3.put_object(
        Bucket="my-data",
        Key="trajectory/manifest.json",
        Body=body,
        ServerSideEncryption="aws:kms",
        SSEKMSKeyId=key,
    )
    (line,) = examine(healthy)["dataset"]
    assert line["what"].endswith(f", encrypted with {key}, which no machine may use")
    assert line["fix"].endswith(f" -c kms={key}")
    assert examine(healthy, f"kms={key}")["dataset"][0]["state"] == "ok"


def test_the_accounts_own_key_of_volumes_needs_the_grants_too(
    healthy: Clinic, examine: Examine
) -> None:
    assert "key" not in examine(healthy)
    healthy.default_key = healthy.aws.client("kms").create_key()["KeyMetadata"]["Arn"]
    lines = examine(healthy)["key"]
    # No topic is encrypted with it.
    assert ["Client.InternalError" in each["what"] for each in lines] == [True, True]
    assert "key" not in examine(healthy, "kms=create")


def test_commands_name_the_partition_and_the_profile(
    healthy: Clinic, capsys: pytest.CaptureFixture[str]
) -> None:
    key = healthy.aws.client("kms").create_key()["KeyMetadata"]["Arn"]
    there = key.replace("arn:aws:", "arn:aws-us-gov:")
    assert main(["--profile", "my team", "-c", f"kms={there}"], healthy.connect) == 1
    out = capsys.readouterr().out
    assert "--grantee-principal arn:aws-us-gov:iam::123456789012:role/aws-service-role/" in out
    fixes = [line.split("$ ", 1)[1] for line in out.splitlines() if " $ " in line]
    assert fixes and all(each.startswith("export AWS_PROFILE='my team'; ") for each in fixes)


def test_credentials_that_do_not_count_are_renewed(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise ClientError({"Error": {"Code": "InvalidClientTokenId"}}, "GetCallerIdentity")

    sts = SimpleNamespace(get_caller_identity=refuse)
    assert main([], lambda _: (lambda _: sts, "us-east-1")) == 2
    out = capsys.readouterr().out
    assert (
        "does not accept these credentials" in out
        and "$ export AWS_PROFILE=NAME   # or, with AWS CLI 2, in" in out
    )
    assert "get-region-opt-status --region us-east-1 --region-name us-east-1)" in out


@pytest.mark.parametrize(
    ("region", "says"),
    [
        ("us-east-1", "cannot call AWS"),
        ("eu-nowhere-1", "eu-nowhere-1 is no region that botocore"),
    ],
)
def test_fails_without_a_network_and_for_an_unknown_region_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], region: str, says: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setenv("AWS_REGION", region)
    # Nobody listens on the discard port.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert main([]) == 2
    assert says in capsys.readouterr().out


def test_fails_for_a_context_that_is_none(
    healthy: Clinic, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-c", "size=g5.huge"], healthy.connect) == 2
    assert "not in the instance catalogue" in capsys.readouterr().err
    assert main(["-c", "kms"]) == 2
    assert "-c kms is not NAME=VALUE" in capsys.readouterr().err
