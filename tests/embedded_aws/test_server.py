"""The embedded AWS as a server: port, variables, images, start and stop."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from embedded_aws import EmbeddedAws
from embedded_aws.images import offered_images

AMI = (
    "/aws/service/deeplearning/ami/x86_64/"
    "oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
)


def test_the_printed_variables_are_enough_for_the_aws_cli(aws: EmbeddedAws) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    command = [str(Path(sys.executable).with_name("aws")), "ssm", "get-parameter", "--name", AMI]
    done = subprocess.run(
        [*command, "--query", "Parameter.Value", "--output", "text"],
        env={**kept, **aws.environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("ami-")


def test_a_command_starts_it_alone_prints_its_variables_and_ends_at_ctrl_c() -> None:
    command = [sys.executable, "-m", "embedded_aws", "--port", "0", "--region", "eu-west-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(10)][1:]
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    names = dict(line.removeprefix("export ").strip().split("=", 1) for line in said)
    assert names["AWS_REGION"] == "eu-west-1"
    assert names["AWS_ENDPOINT_URL"].startswith("http://127.0.0.1:")


def test_neither_a_proxy_nor_a_profile_of_the_user_is_in_the_way() -> None:
    proxy, none = "http://127.0.0.1:9", "localhost, 127.0.0.1:9"
    own = {"HTTP_PROXY": proxy, "http_proxy": proxy, "NO_PROXY": none, "no_proxy": none}
    command = [sys.executable, "-m", "embedded_aws", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **own, "AWS_PROFILE": "none"}
    ) as process:
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(10))
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    ignored = {"AWS_PROFILE": "none", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    shell = ["sh", "-ec", f'{said}echo "$NO_PROXY|$no_proxy"; env']
    environment = {**os.environ, **ignored, "AWS_ENDPOINT_URL_STS": "http://localhost:4566"}
    done = subprocess.run(shell, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    proxies, *left = done.stdout.splitlines()
    assert proxies == f"{none},127.0.0.1|{none},127.0.0.1"
    left = [line for line in left if line.startswith("AWS_")]
    assert len(left) == 7 and not {*ignored} & {line.partition("=")[0] for line in left}


def test_a_proxy_that_the_user_leaves_out_everywhere_stays_out(
    aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
    assert aws.environment()["NO_PROXY"] == "*"


def test_templates_and_schemas_are_read_without_moto() -> None:
    names = "create_only_values, custom_name, is_disputed, references, replacing_paths"
    program = f"import sys; sys.modules['moto'] = None; from embedded_aws import {names}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_offered_image_exists_in_ec2(aws: EmbeddedAws) -> None:
    ssm, ec2 = aws.client("ssm"), aws.client("ec2")
    images = offered_images()
    assert AMI in images
    for name, wanted in images.items():
        image = ssm.get_parameter(Name=name)["Parameter"]["Value"]
        assert ec2.describe_images(ImageIds=[image])["Images"][0]["Name"] == wanted


def test_the_account_and_region_are_the_ones_that_sts_says(aws: EmbeddedAws) -> None:
    caller = aws.client("sts").get_caller_identity()
    assert caller["Account"] == aws.account
    zones = aws.client("ec2").describe_availability_zones()["AvailabilityZones"]
    assert all(zone["RegionName"] == aws.region for zone in zones)


def test_fails_to_run_twice_in_one_process(aws: EmbeddedAws) -> None:
    with pytest.raises(ValueError, match="already running in this process"):
        EmbeddedAws().start()


def test_fails_on_a_service_that_does_not_exist(aws: EmbeddedAws) -> None:
    key = aws.environment()["AWS_ACCESS_KEY_ID"]
    client = boto3.client(
        "braket",
        endpoint_url=aws.endpoint,
        region_name=aws.region,
        aws_access_key_id=key,
        aws_secret_access_key=key,
    )
    with pytest.raises(ClientError, match="does not have the service braket"):
        client.search_devices(filters=[])
    client.close()


@pytest.mark.parametrize("key", ["embedded", "x", "ASIA0123456789"])
def test_whoever_does_not_know_the_root_users_key_is_nobody(aws: EmbeddedAws, key: str) -> None:
    """Else a web page, or another user of the computer, deploys what a rehearsal then boots."""
    stranger = boto3.client(
        "cloudformation",
        endpoint_url=aws.endpoint,
        region_name=aws.region,
        aws_access_key_id=key,
        aws_secret_access_key="secret",
    )
    with pytest.raises(ClientError, match="AccessDenied"):
        stranger.create_stack(StackName="theirs", TemplateBody='{"Resources": {}}')
    stranger.close()
