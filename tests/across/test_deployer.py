"""The deployer's policy (docs/deployer.md) is enough to deploy, and allows nothing besides."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cfnlint
import pytest
from botocore.exceptions import ClientError

from contract.keys import PACKED, UNFINISHED
from embedded_aws import EmbeddedAws
from tests.embedded_aws.cdk_cli import NEVER, REPOSITORY, Cli
from tests.embedded_aws.iam.roles import make_role, signed_by
from tests.page_policies import allowed, policy
from tests.stack_names import DATASET
from training.durable.store.dataset import StoreOutput
from training.durable.store.protocol import StoreError


@pytest.mark.parametrize("page", ["deployer.md", "runs.md"])
def test_every_action_of_a_page_is_one_of_aws_s(page: str) -> None:
    tables = Path(cfnlint.__file__).parent / "data" / "AdditionalSpecs" / "Policies.json"
    services = json.loads(tables.read_text())
    unknown = [
        each
        for each in allowed(page)
        if each.partition(":")[2].lower() not in services[each.partition(":")[0]]["Actions"]
    ]
    assert unknown == []


def test_the_doctors_command_for_old_prices_is_allowed() -> None:
    """What `python -m sizing catalogue --refresh` asks (sizing/catalogue/refresh.py)."""
    asked = {"ec2:DescribeSpotPriceHistory", "ec2:GetSpotPlacementScores", "pricing:GetProducts"}
    assert asked | {"servicequotas:GetServiceQuota"} <= allowed("deployer.md")


@dataclass
class Deployer:
    """A session of a role with the page's policy: its variables and its clients."""

    aws: EmbeddedAws
    session: Any

    def environment(self) -> dict[str, str]:
        return {
            **self.aws.environment(),
            "AWS_ACCESS_KEY_ID": self.session.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.session.secret_access_key,
            "AWS_SESSION_TOKEN": self.session.session_token,
        }

    def python(self, *arguments: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=REPOSITORY,
            env={**kept, **self.environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode in (0, 1), done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def deployer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployer]:
    with EmbeddedAws() as aws:
        administrator = Cli(aws, tmp_path_factory.mktemp("bootstrap"))
        place = f"aws://{aws.account}/{aws.region}"
        administrator.run("bootstrap", place, "--app", "", app=False)
        text = json.dumps(policy("deployer.md")["Statement"])
        for name in ("dataset", "run"):
            text = text.replace(f"{name}-bucket".upper(), f"{DATASET.lower()}-{name}bucket*")
        arn = make_role(aws, "Deployer", *json.loads(text))
        at = f"arn:aws:ec2:{aws.region}:{aws.account}:instance/i-0"
        yield Deployer(aws, aws.access.assume(arn, service="ec2", source_arn=at, name="deployer"))


def test_the_policy_is_enough_to_pack_a_dataset_into_its_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = json.dumps(policy("deployer.md")["Statement"]).replace("DATASET-BUCKET", "data")
    with EmbeddedAws() as aws:
        aws.client("s3").create_bucket(Bucket="data")
        arn = make_role(aws, "Packer", *json.loads(text))
        at = f"arn:aws:ec2:{aws.region}:{aws.account}:instance/i-0"
        session = aws.access.assume(arn, service="ec2", source_arn=at, name="packer")
        for name, value in Deployer(aws, session).environment().items():
            monkeypatch.setenv(name, value)
        output = StoreOutput(uri="s3://data/birds")
        for name in (UNFINISHED, f"{PACKED}train-0", "train-0.bin", "manifest.json"):
            output.write(name, b"{}")
        output.clean_up()
        assert output.sizes().keys() == {"train-0.bin", "manifest.json"}
        # S3 says it of each object, in an answer that is none of an error.
        with pytest.raises(StoreError, match=r"\(AccessDenied\).* DeleteObjects.*s3:DeleteObject"):
            output.delete(["train-0.bin"])
        answer = signed_by(aws, session)("s3").delete_objects(
            Bucket="data", Delete={"Objects": [{"Key": "birds/train-0.bin"}], "Quiet": True}
        )
        assert [each["Code"] for each in answer["Errors"]] == ["AccessDenied"]


@pytest.mark.slow
def test_a_role_with_the_policy_deploys_uploads_reviews_and_asks_the_doctor(
    deployer: Deployer, tmp_path: Path
) -> None:
    cli = Cli(deployer, tmp_path / "cdk.out")  # type: ignore[arg-type]
    cli.run("deploy", "DatasetStack", *NEVER, app=False)
    (stack,) = deployer.aws.client("cloudformation").describe_stacks(StackName=DATASET)["Stacks"]
    told = {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}
    bucket = told["DatasetBucketName"]
    to = f"--dataset-uri=s3://{bucket}/trajectory"
    made = ("--workload=trajectory", "--count=55", f"--out={tmp_path / 'data'}", to)
    assert "[ok]" in deployer.python("training", "data", "make", *made)
    cli.run("deploy", "TrainingStack", *NEVER, app=False)
    assert "may not call" not in (said := deployer.python("stacks.doctor"))
    assert "denied to these credentials alone; CloudFormation makes the call" in said
    assert "What this change does to what is deployed" in deployer.python("review", "--deployed")
    (denials,) = [deployer.aws.access.evidence.report()["denied"]]
    assert {each["action"] for each in denials if each["caller"] == "Deployer"} <= {
        "cloudformation:DetectStackDrift",
        "ec2:RequestSpotFleet",
    }
    client = signed_by(deployer.aws, deployer.session)
    with pytest.raises(ClientError, match="AccessDenied"):
        client("s3").delete_object(Bucket=bucket, Key="trajectory/manifest.json")
    with pytest.raises(ClientError, match=r"AccessDenied|UnauthorizedOperation"):
        client("ec2").run_instances(ImageId="ami-1", MinCount=1, MaxCount=1)
