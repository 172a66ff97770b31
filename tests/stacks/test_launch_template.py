"""The launch template's security and volumes: cdk-nag does not look into launch templates."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stack_names import TRAINING
from tests.stacks.conftest import DEFAULTS, REPOSITORY
from tests.stacks.templates import only


def data_of(templates: Any) -> Any:
    return only(templates["TrainingStack"], "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]


@pytest.fixture(scope="module")
def data(templates: Any) -> Any:
    return data_of(templates)


def test_metadata_needs_a_token_and_stays_on_the_instance(data: Any) -> None:
    assert data["MetadataOptions"] == {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 1,
    }  # nor tags, for which EC2 would refuse keys with a space or a slash


def test_both_volumes_are_encrypted_and_go_with_the_instance(data: Any) -> None:
    root, dataset = data["BlockDeviceMappings"]
    assert (root["DeviceName"], dataset["DeviceName"]) == ("/dev/sda1", "/dev/sdf")
    for volume in (root["Ebs"], dataset["Ebs"]):
        assert volume["Encrypted"] is True
        assert volume["DeleteOnTermination"] is True
        assert volume["VolumeType"] == "gp3"
    assert (root["Ebs"]["VolumeSize"], dataset["Ebs"]["VolumeSize"]) == (100, 200)
    assert (dataset["Ebs"]["Iops"], dataset["Ebs"]["Throughput"]) == (3000, 125)


def test_only_the_root_volume_is_loaded_at_a_rate_and_only_where_one_is_given(
    data: Any, synthesize: Callable[..., Any]
) -> None:
    assert "VolumeInitializationRate" not in str(data["BlockDeviceMappings"])
    loaded = data_of(synthesize(**{"root_volume.initialization_mib_per_second": 300}))
    root, dataset = loaded["BlockDeviceMappings"]
    assert root["Ebs"]["VolumeInitializationRate"] == 300
    assert "VolumeInitializationRate" not in dataset["Ebs"]


def test_on_the_instance_store_there_is_no_data_volume(synthesize: Callable[..., Any]) -> None:
    data = data_of(synthesize(data_on="nvme"))
    assert [each["DeviceName"] for each in data["BlockDeviceMappings"]] == ["/dev/sda1"]
    assert "DATA_ON=nvme" in str(data["UserData"])


@pytest.mark.slow  # weekly: only another aws-cdk-lib or cfn-lint could change it
def test_more_iops_than_the_rule_knows_pass_it(tmp_path: Path) -> None:
    """E3671, of cfn-lint and of every synth, ends at the 16,000 IOPS that gp3 had until 2025."""
    sizes = {"size": "g5.12xlarge", "data_volume.gib": 400, "data_volume.iops": 20_000}
    environ = {
        **os.environ,
        "CDK_OUTDIR": str(tmp_path),
        "CDK_CONTEXT_JSON": json.dumps({**DEFAULTS, **sizes}),
        "CDK_VALIDATION": "true",  # which the other tests do without
    }
    subprocess.run([sys.executable, "app.py"], env=environ, check=True, cwd=REPOSITORY)
    report = json.loads((tmp_path / "validation-report.json").read_text())
    (rules,) = report["pluginReports"]
    assert "E3671" not in [each["ruleName"] for each in rules["violations"]]
    assert "E3671" in [each["ruleName"] for each in rules["suppressedViolations"]]
    command = [sys.executable, "-m", "cfnlint", str(tmp_path / f"{TRAINING}.template.json")]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "E3671" not in linted.stdout


def test_instances_and_volumes_are_tagged_for_guard_and_fleet(data: Any) -> None:
    for resource_type in ("instance", "volume"):
        (tags,) = [
            each["Tags"]
            for each in data["TagSpecifications"]
            if each["ResourceType"] == resource_type
        ]
        named = {tag["Key"]: tag["Value"] for tag in tags}
        assert named == {
            "Name": f"{TRAINING}-run-1",
            "RunId": "run-1",
            "Stack": TRAINING,
        }


def test_an_image_id_pins_the_image(synthesize: Callable[..., Any]) -> None:
    pinned = synthesize(pytorch_ami_parameter="ami-0123456789abcdef0")
    assert data_of(pinned)["ImageId"] == "ami-0123456789abcdef0"
    assert "ami-id" not in str(pinned["TrainingStack"]["Parameters"])
