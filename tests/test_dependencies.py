"""What we rely on in packages that are not ours, where a good guess is wrong: it is still so.

docs/dependencies.md has the table: each row names the test here, or elsewhere, that fails if a new
version behaves differently.
"""

import importlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aws_cdk as cdk
import cdk_nag
import pytest
import torch
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_s3 as s3
from torch.optim import lr_scheduler

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs/dependencies.md"
HEADING = "## What we rely on, and where a good guess is wrong"


def test_each_row_of_the_table_names_a_test_or_script_that_is_there() -> None:
    _, _, section = DOCS.read_text().partition(HEADING)
    rows = re.findall(r"^\| .* \|$", section.partition("\n## ")[0], re.MULTILINE)[1:]
    assert len(rows) >= 20
    for row in rows:
        places = re.findall(r"`((?:tests|findings)/[\w/]+\.(?:py|sh))(?:::(\w+))?`", row)
        assert places or "nothing of ours uses it" in row, f"no test in {row}"
        for path, name in places:
            text = (REPOSITORY / path).read_text()
            assert not name or f"def {name}(" in text, f"{path} has no {name}"


@pytest.mark.parametrize("package", ["botocore", "awscli.botocore"])
def test_botocore_s_standard_retries_are_short_and_soon_used_up(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's quota is for all of its calls: after some failures it tries each call once."""
    session, config, request = (
        importlib.import_module(f"{package}.{name}") for name in ("session", "config", "awsrequest")
    )
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    client = session.Session().create_client(
        "s3",
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=config.Config(retries={"mode": "standard", "total_max_attempts": 10}),
    )
    sent = []

    def answer(request: Any, **_: Any) -> Any:
        sent.append(request)
        found = request_class(request.url, 503, {}, SimpleNamespace(stream=lambda **_: iter([])))
        found._content = b"<Error><Code>InternalError</Code><Message>-</Message></Error>"
        return found

    request_class = request.AWSResponse
    client.meta.events.register("before-send.s3", answer)
    attempts = []
    for _ in range(8):
        before = len(sent)
        with pytest.raises(Exception, match="InternalError"):
            client.get_object(Bucket="b", Key="k")
        attempts.append(len(sent) - before)
    # A retry takes 14 of 500; each pause is at most 0.05 s x 2^i, at most 20 s.
    assert attempts == [10, 10, 10, 9, 1, 1, 1, 1]
    assert all(each <= 0.05 * 2**i for i, each in enumerate(slept[:9]))


def _synthesized(make: Callable[[cdk.Stack], object]) -> Any:
    app = cdk.App(context={"aws:cdk:disable-version-reporting": True})
    stack = cdk.Stack(app, "Stack", synthesizer=cdk.LegacyStackSynthesizer())
    make(stack)
    return app.synth().get_stack_by_name("Stack").template["Resources"]


def test_jsii_drops_keys_of_a_nested_dict_that_it_does_not_know() -> None:
    """Names in snake_case, and any typo, are lost without a word: we pass the classes."""

    def fleet(stack: cdk.Stack, override: Any) -> None:
        template = {"launch_template_specification": {"version": "1"}, "overrides": [override]}
        ec2.CfnSpotFleet(
            stack,
            "Fleet",
            spot_fleet_request_config_data={
                "iamFleetRole": "r",
                "targetCapacity": 1,
                "launchTemplateConfigs": [template],
            },
        )

    (found,) = _synthesized(lambda stack: fleet(stack, {"instance_type": "g5.xlarge"})).values()
    data = found["Properties"]["SpotFleetRequestConfigData"]
    assert "g5.xlarge" not in json.dumps(data)


def test_cdk_nag_3_raises_out_of_a_synth_and_takes_an_empty_reason() -> None:
    def bucket(stack: cdk.Stack, *findings: str) -> None:
        made = s3.CfnBucket(stack, "Bucket")
        cdk.Validations.of(stack.node.root).add_plugins(cdk_nag.AwsSolutionsChecks(stack))
        cdk.Validations.of(made).acknowledge(
            *(cdk.Acknowledgment(id=f"AwsSolutions-{each}", reason="") for each in findings)
        )

    assert not hasattr(cdk_nag, "NagSuppressions")
    with pytest.raises(RuntimeError, match="server access logs disabled"):
        _synthesized(bucket)
    assert _synthesized(lambda stack: bucket(stack, "S1", "S10"))


def test_a_norm_on_the_cpu_is_too_small_over_many_values() -> None:
    """`clip_grad_norm_` too, in float32: a rehearsal's clipping, not that of a GPU."""
    values = torch.rand(50_000_000, generator=torch.Generator().manual_seed(0))
    relative = float(torch.linalg.vector_norm(values)) / float(values.double().norm()) - 1
    assert -0.01 < relative < -0.0005
    few = values[:1_000_000]
    assert abs(float(torch.linalg.vector_norm(few)) / float(few.double().norm()) - 1) < 1e-4


def _rates(make: Callable[[torch.optim.Optimizer], Any], *, loads_first: bool | None) -> Any:
    """The rates of ten steps, with a restart after five in this order, or without one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = make(optimizer), []
    for step in range(10):
        if step == 5 and loads_first is not None:
            states = optimizer.state_dict(), schedule.state_dict()
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
            if loads_first:
                optimizer.load_state_dict(states[0])
            schedule = make(optimizer)
            if not loads_first:
                optimizer.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("make", "is_broken"),
    [
        (lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 8), True),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
            ),
            True,
        ),
        (
            lambda o: lr_scheduler.ChainedScheduler(
                [lr_scheduler.LinearLR(o, 0.1, 1.0, 8), lr_scheduler.ExponentialLR(o, 0.9)]
            ),
            True,
        ),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 10), False),
    ],
    ids=["LinearLR", "SequentialLR", "ChainedScheduler", "CosineAnnealingLR"],
)
def test_a_scheduler_made_after_its_optimizer_was_loaded(
    make: Callable[[torch.optim.Optimizer], Any], is_broken: bool
) -> None:
    whole = _rates(make, loads_first=None)
    assert _rates(make, loads_first=False) == whole
    assert (_rates(make, loads_first=True) != whole) == is_broken


def test_a_dropout_s_mask_follows_the_memory_layout() -> None:
    images, masks = torch.ones(4, 4, 2, 2), []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        masks.append(torch.nn.functional.dropout(images.contiguous(memory_format=layout), 0.5))
    assert not torch.equal(*masks)


def _fleet_template(target: int, size: str) -> Any:
    override = {"InstanceType": size}
    specification = {"LaunchTemplateId": "lt-1", "Version": "1"}
    data = {
        "IamFleetRole": "r",
        "TargetCapacity": target,
        "LaunchTemplateConfigs": [
            {"LaunchTemplateSpecification": specification, "Overrides": [override]}
        ],
    }
    fleet = {"Type": "AWS::EC2::SpotFleet", "Properties": {"SpotFleetRequestConfigData": data}}
    return {"Resources": {"Fleet": fleet}}


def test_cdk_diff_takes_a_replacement_of_a_spot_fleet_for_an_update(tmp_path: Path) -> None:
    """Nested create-only properties are not looked at: the review compares them itself."""
    assembly, before = tmp_path / "assembly", tmp_path / "before.json"
    assembly.mkdir()
    manifest = {
        "version": "36.0.0",
        "artifacts": {
            "Stack": {
                "type": "aws:cloudformation:stack",
                "environment": "aws://unknown-account/unknown-region",
                "properties": {"templateFile": "Stack.json"},
            }
        },
    }
    (assembly / "manifest.json").write_text(json.dumps(manifest))
    (assembly / "Stack.json").write_text(json.dumps(_fleet_template(1, "g5.2xlarge")))
    before.write_text(json.dumps(_fleet_template(1, "g5.xlarge")))
    command = ["npx", "--no-install", "cdk", "diff", "Stack", "--app", str(assembly)]
    path = os.pathsep.join([str(REPOSITORY / ".venv/bin"), os.environ["PATH"]])
    ran = subprocess.run(
        [*command, "--template", str(before), "--fail-on=destructive"],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": path, "CI": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "g5.2xlarge" in ran.stdout + ran.stderr
    assert "replace" not in ran.stdout + ran.stderr


@pytest.mark.machine
def test_blkid_finds_two_file_systems_ambivalent_only_where_it_probes(tmp_path: Path) -> None:
    """Without --probe it says what it says of an empty disk, which a boot step would format."""
    images = [tmp_path / name for name in ("ext4", "xfs")]
    for image in images:
        with image.open("wb") as file:
            file.truncate(400 * 2**20)
    subprocess.run(["mkfs.ext4", "-qF", images[0]], check=True)
    subprocess.run(["mkfs.xfs", "-q", images[1]], check=True)
    with images[0].open("r+b") as both, images[1].open("rb") as other:
        both.write(other.read(512))

    def found(*command: str) -> tuple[int, str]:
        ran = subprocess.run([*command, images[0]], capture_output=True, text=True, check=False)
        return ran.returncode, ran.stdout

    assert found("blkid") == (2, "")
    assert found("blkid", "--probe") == (8, "")
    assert {"ext4", "xfs"} <= set(found("wipefs", "--noheadings")[1].split())
