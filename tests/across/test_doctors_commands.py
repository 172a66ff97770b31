"""Accounts in which something is wrong: the commands that the doctor prints, typed, mend it."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from embedded_aws import EmbeddedAws
from tests.embedded_aws.cdk_cli import NEVER, REPOSITORY, needs_cdk
from tests.embedded_aws.iam.roles import make_role
from tests.page_policies import policy
from tests.stack_names import named
from tests.stacks.doctor.public_access import block_public_access

pytestmark = pytest.mark.slow
DATA = "my-data"
AT = "us-east-1"
Findings = dict[str, list[dict[str, str]]]


class Account:
    """An account, the doctor in it, and a shell in which somebody types what it prints."""

    def __init__(self, aws: EmbeddedAws) -> None:
        self.aws, self.ec2 = aws, aws.client("ec2")
        self.options = [f"dataset_bucket={DATA}", "run_bucket=my-runs"]
        self.variables = aws.environment()
        self.typed: list[str] = []

    def type(self, command: str, variables: dict[str, str] | None = None) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        path = f"{REPOSITORY}/.venv/bin:{REPOSITORY}/node_modules/.bin:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-o", "errexit", "-c", command],
            cwd=REPOSITORY,
            env={**kept, **(variables or self.variables), "PATH": path, "AWS_PAGER": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def examine(self, variables: dict[str, str] | None = None) -> Findings:
        pairs = [word for option in self.options for word in ("-c", option)]
        command = [sys.executable, "-m", "stacks.doctor", "--json", *pairs]
        said = self.type(f"{shlex.join(command)} || true", variables)
        found: Findings = {}
        for each in json.loads(said[said.index("[") :]):
            found.setdefault(each["check"], []).append(each)
        return found

    def follow(self, most: int = 6) -> Findings:
        """Type the command of each problem, as its administrator, until none is left."""
        for _ in range(most):
            found = self.examine()
            problems = [each for some in found.values() for each in some if is_problem(each)]
            if not problems:
                return found
            for each in problems:
                command = re.sub(
                    r"npx cdk (deploy .*?)(  #.*)?$", rf"cdk \1 {' '.join(NEVER)}", each["fix"]
                )
                self.typed.append(command)
                self.type(command.replace("npx cdk", "cdk"))
                self.options += re.findall(r"-c (prefix=\S+)", command)
        raise AssertionError(f"still {problems} after {self.typed}")

    def network(self, zones: str = "ab") -> tuple[str, list[str]]:
        vpc = self.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
        subnets = [
            self.ec2.create_subnet(
                VpcId=vpc, CidrBlock=f"10.9.{number}.0/24", AvailabilityZone=f"{AT}{zone}"
            )["Subnet"]["SubnetId"]
            for number, zone in enumerate(zones)
        ]
        self.options += [f"vpc={vpc}", f"subnets={','.join(subnets)}"]
        return vpc, subnets


def is_problem(found: dict[str, str]) -> bool:
    return found["state"] == "problem"


@pytest.fixture
def account() -> Iterator[Account]:
    """It has nothing yet but a dataset, and others' stack under the name of ours."""
    with EmbeddedAws() as aws:
        for bucket in (DATA, "my-runs"):
            aws.client("s3").create_bucket(Bucket=bucket)
        manifest = json.dumps({"files": [{"name": "clips.npy", "bytes": 1}]}).encode()
        aws.client("s3").put_object(Bucket=DATA, Key="trajectory/manifest.json", Body=manifest)
        yield Account(aws)


def endpoints(account: Account, vpc: str) -> dict[str, Any]:
    of_vpc = {"Name": "vpc-id", "Values": [vpc]}
    found = account.ec2.describe_vpc_endpoints(Filters=[of_vpc])["VpcEndpoints"]
    return {each["ServiceName"].rpartition(".")[2]: each for each in found}


@needs_cdk
def test_a_vpc_without_a_way_out_gets_endpoints_that_admit_our_machines(account: Account) -> None:
    vpc, subnets = account.network()
    (line,) = [e for e in account.examine()["network"] if "a month" in e["what"]]
    assert "4 endpoints in 2 zones for about $58 a month (list price in us-east-1" in line["what"]
    assert "all machines of the VPC would use, also instead of their NAT" in line["what"]
    found = account.follow()
    assert found["network"][0]["what"].endswith("reach AWS by endpoints, without an address")
    made = endpoints(account, vpc)
    assert made.keys() == {"s3", "ec2", "monitoring", "ssm", "ssmmessages"}
    for name in made.keys() - {"s3"}:
        assert sorted(made[name]["SubnetIds"]) == sorted(subnets)
        (group,) = made[name]["Groups"]
        (described,) = account.ec2.describe_security_groups(GroupIds=[group["GroupId"]])[
            "SecurityGroups"
        ]
        (rule,) = described["IpPermissions"]
        assert (rule["FromPort"], rule["IpRanges"][0]["CidrIp"]) == (443, "10.9.0.0/16")


@needs_cdk
def test_two_subnets_of_a_zone_and_endpoints_that_admit_nobody_are_mended(
    account: Account,
) -> None:
    vpc, subnets = account.network("aa")
    # As made without --security-group-ids: they have the default group, which admits itself.
    account.ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
    for name in ("ec2", "monitoring", "ssm", "ssmmessages"):
        account.ec2.create_vpc_endpoint(
            VpcId=vpc, ServiceName=f"com.amazonaws.{AT}.{name}", VpcEndpointType="Interface",
            SubnetIds=subnets[:1], PrivateDnsEnabled=True,
        )  # fmt: skip
    (line,) = account.examine()["network"]
    assert "takes only one subnet of each zone" in line["what"]
    account.options[-1] = shlex.split(line["fix"])[-1]
    lines = [each["what"] for each in account.examine()["network"]]
    assert sum("ssmmessages in " in e and "do not admit the subnets" in e for e in lines) == 1
    assert account.follow()["network"][0]["state"] == "ok"


@needs_cdk
def test_a_vpc_that_resolves_no_names_of_aws_is_mended(account: Account) -> None:
    vpc, _ = account.network("a")
    for attribute in ("EnableDnsSupport", "EnableDnsHostnames"):
        account.ec2.modify_vpc_attribute(VpcId=vpc, **{attribute: {"Value": False}})
    given = [{"Key": "domain-name", "Values": ["corp.example"]}]
    options = account.ec2.create_dhcp_options(DhcpConfigurations=given)["DhcpOptions"]
    account.ec2.associate_dhcp_options(DhcpOptionsId=options["DhcpOptionsId"], VpcId=vpc)
    account.variables["HTTPS_PROXY"] = "http://proxy.corp.example:3128"
    account.variables["NO_PROXY"] = "localhost,127.0.0.1"
    said = str(account.examine()["network"])
    assert "has enableDnsSupport off" in said and "has enableDnsHostnames off" in said
    assert "names no DNS server" in said
    assert "do not use this shell's proxy http://proxy.corp.example:3128" in said
    assert account.follow()["network"][0]["state"] == "ok"


@needs_cdk
def test_blocked_public_access_lets_our_own_network_out(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    excluded = block_public_access(monkeypatch, "block-bidirectional")
    (line,) = account.examine()["public access"]
    assert "(block-bidirectional) keeps machines of NetworkStack from AWS" in line["what"]
    after = account.follow()
    assert "is excluded from VPC Block Public Access" in after["public access"][0]["what"]
    (found,) = excluded.values()
    assert found["InternetGatewayExclusionMode"] == "allow-bidirectional"


@needs_cdk
def test_stacks_of_others_and_another_qualifier_end_in_a_deploy(account: Account) -> None:
    account.type(f"cdk bootstrap aws://{account.aws.account}/{AT} --app ''")
    stacks = account.aws.client("cloudformation")
    theirs = json.dumps({"Resources": {"T": {"Type": "AWS::SNS::Topic"}}})
    stacks.create_stack(StackName=named("TrainingStack"), TemplateBody=theirs)
    account.options += ["@aws-cdk/core:bootstrapQualifier=team1"]
    found = account.examine()
    (line,) = found["bootstrap"]
    assert "no /cdk-bootstrap/team1/version; CDKToolkit is there" in line["what"]
    assert "is not this project's" in found[f"stack {named('TrainingStack')}"][0]["what"]
    account.follow()
    assert any(" -c prefix=NAME-" in each for each in account.typed)
    (ours,) = stacks.describe_stacks(StackName="NAME-TrainingStack")["Stacks"]
    assert ours["StackStatus"] == "CREATE_COMPLETE"
    assert account.aws.engine.missing_resources([named("TrainingStack")]) == []


@needs_cdk
def test_a_denied_call_is_allowed_by_its_command_unless_the_organization_denies_it(
    account: Account,
) -> None:
    statements = policy("deployer.md")["Statement"]
    arn = make_role(account.aws, "Deployer", *[e for e in statements if e["Sid"] != "Doctor"])
    at = f"arn:aws:ec2:{AT}:{account.aws.account}:instance/i-0"
    session = account.aws.access.assume(arn, service="ec2", source_arn=at, name="deployer")
    deployers = account.variables | {
        "AWS_ACCESS_KEY_ID": session.access_key_id,
        "AWS_SECRET_ACCESS_KEY": session.secret_access_key,
        "AWS_SESSION_TOKEN": session.session_token,
    }
    found = account.examine(deployers)
    (line,) = found["bootstrap"]
    assert "an identity-based policy would have to allow ssm:GetParameter" in line["what"]
    assert "asked by Doctor of docs/deployer.md" in line["what"]
    for sids in ({"Doctor", "DatasetsAndHeads"}, set()):  # by an administrator
        lines = [each for some in account.examine(deployers).values() for each in some]
        denied = [each for each in lines if "would have to allow" in each["what"]]
        assert {re.findall(r"asked by (\w+) of", each["what"])[0] for each in denied} == sids
        for command in {each["fix"] for each in denied}:
            account.type(command)
    deny = {"Effect": "Deny", "Action": "iam:ListRoles", "Resource": "*"}
    account.aws.access.organization.append(json.dumps({"Statement": [deny]}))
    (line,) = account.examine(deployers)["service role"]
    assert line["state"] == "warning"
    assert "a service control policy denies iam:ListRoles: only the organization's" in line["what"]
