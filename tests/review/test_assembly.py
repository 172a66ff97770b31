"""The stacks of an assembly: those of CDK Stages too, and whose region's prices count."""

import json
from pathlib import Path

import pytest
from aws_cdk import App, Environment, RemovalPolicy, Stack, Stage
from aws_cdk import aws_s3 as s3

from review.assembly import read_assembly, run_cdk_diff
from review.verdict import judge
from tests.review.conftest import REPOSITORY


def staged(out: Path, *buckets: str) -> Path:
    """An assembly of an app whose only stacks are those of two CDK Stages."""
    app = App(outdir=str(out), builtin_cloud_formation_validation=False)
    for region in ("eu-west-1", "us-west-2"):
        stage = Stage(app, region, env=Environment(account="111122223333", region=region))
        stack = Stack(stage, "Data", stack_name="Data")
        for name in buckets:
            s3.Bucket(stack, name, removal_policy=RemovalPolicy.RETAIN)
    return Path(app.synth().directory)


def test_fails_for_a_bucket_that_a_stage_loses(tmp_path: Path) -> None:
    base = read_assembly(staged(tmp_path / "base", "Runs", "Clips"), "base")
    head = read_assembly(staged(tmp_path / "head", "Runs"), "head")
    assert {name: stack.region for name, stack in head.stacks.items()} == {
        "Data": "eu-west-1",
        "us-west-2/Data": "us-west-2",
    }
    review = judge(base, head, [])
    lost = {each.stack for each in review.effects if each.kind == "loss"}
    assert lost == {"Data", "us-west-2/Data"}
    assert review.exit_code("data-loss") == 1


@pytest.mark.slow
def test_the_cli_finds_the_stack_of_a_stage(tmp_path: Path) -> None:
    base = read_assembly(staged(tmp_path / "base", "Runs", "Clips"), "base")
    folder = staged(tmp_path / "head", "Runs")
    for name, stack in read_assembly(folder, "head").stacks.items():
        template = base.stacks[name].template
        diff = run_cdk_diff(REPOSITORY, folder, name, stack.construct_id, template)
        assert "[-] AWS::S3::Bucket" in diff.text


@pytest.mark.parametrize(
    ("environment", "variables", "region"),
    [
        ("aws://111122223333/eu-west-1", {"AWS_REGION": "us-west-2"}, "eu-west-1"),
        ("aws://unknown-account/unknown-region", {"AWS_REGION": "us-west-2"}, "us-west-2"),
        ("aws://unknown-account/unknown-region", {"AWS_REGION": ""}, "us-east-1"),
        ("aws://unknown-account/unknown-region", {"AWS_PROFILE": "nobody"}, "us-east-1"),
    ],
)
def test_a_sides_region(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: str,
    variables: dict[str, str],
    region: str,
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stack = {
        "type": "aws:cloudformation:stack",
        "environment": environment,
        "properties": {"templateFile": "T.template.json"},
    }
    (tmp_path / "manifest.json").write_text(json.dumps({"artifacts": {"T": stack}}))
    (tmp_path / "T.template.json").write_text("{}")
    assert read_assembly(tmp_path, "a side").stacks["T"].region == region
