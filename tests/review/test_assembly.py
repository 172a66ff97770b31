"""The stacks of an assembly, those of CDK Stages too, and the environment of the base's app."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from aws_cdk import App, Environment, NestedStack, RemovalPolicy, Stack, Stage
from aws_cdk import aws_s3 as s3

from review.assembly import CannotReview, base_checkout, read_assembly, run_cdk_diff, synthesize
from review.verdict import judge
from tests.review.conftest import REPOSITORY, git


def staged(out: Path, *buckets: str, regions: Sequence[str] = ("eu-west-1", "us-west-2")) -> Path:
    """An assembly of an app whose only stacks are those of CDK Stages."""
    app = App(outdir=str(out), builtin_cloud_formation_validation=False)
    for region in regions:
        stage = Stage(app, region, env=Environment(account="111122223333", region=region))
        stack = Stack(stage, "Data", stack_name="Data")
        for name in buckets:
            s3.Bucket(stack, name, removal_policy=RemovalPolicy.RETAIN)
    return Path(app.synth().directory)


def test_fails_for_a_bucket_that_a_stage_loses(tmp_path: Path) -> None:
    base = read_assembly(staged(tmp_path / "base", "Runs", "Clips"), "base")
    head = read_assembly(staged(tmp_path / "head", "Runs"), "head")
    assert {name: stack.region for name, stack in head.stacks.items()} == {
        "eu-west-1/Data": "eu-west-1",
        "us-west-2/Data": "us-west-2",
    }
    review = judge(base, head, [])
    lost = {each.stack for each in review.effects if each.kind == "loss"}
    assert lost == {"eu-west-1/Data", "us-west-2/Data"}
    assert review.exit_code("data-loss") == 1


def test_a_second_region_s_stack_of_one_name_makes_no_other_one_new(tmp_path: Path) -> None:
    one = read_assembly(staged(tmp_path / "one", "Runs", regions=("eu-west-1",)), "one")
    two = read_assembly(staged(tmp_path / "two", "Runs"), "two")
    assert set(one.stacks) == {"Data"}
    for base, head in ((tmp_path / "one", two), (tmp_path / "two", one)):
        review = judge(read_assembly(base, "base", head), head, [])
        lost = {each.stack for each in review.effects if each.kind == "loss"}
        assert lost == set(), "a stack that leaves the app stays deployed"


def nesting(out: Path, *buckets: str, has_files: bool = True) -> Path:
    """An assembly of a stack with a nested one that has another."""
    context = {"aws:cdk:enable-asset-metadata": has_files, "aws:cdk:enable-path-metadata": True}
    app = App(outdir=str(out), context=context, builtin_cloud_formation_validation=False)
    inner = NestedStack(NestedStack(Stack(app, "Data"), "Outer"), "Inner")
    for name in buckets:
        s3.Bucket(inner, name, removal_policy=RemovalPolicy.DESTROY)
    return Path(app.synth().directory)


def test_fails_for_a_bucket_that_a_nested_stack_loses(tmp_path: Path) -> None:
    base = read_assembly(nesting(tmp_path / "base", "Runs", "Clips"), "base")
    head = read_assembly(nesting(tmp_path / "head", "Runs"), "head")
    review = judge(base, head, [])
    (lost,) = review.of("loss")
    assert lost.path == "Outer/Inner/Clips" and review.exit_code("data-loss") == 1
    assert judge(head, base, []).of("loss") == judge(base, base, []).effects == []


def test_a_nested_stack_that_was_not_read_is_told(tmp_path: Path) -> None:
    base = read_assembly(nesting(tmp_path / "base", "Runs", "Clips", has_files=False), "base")
    head = read_assembly(nesting(tmp_path / "head", "Runs", has_files=False), "head")
    review = judge(base, head, [])
    assert "nobody has looked into it" in review.of("data")[0].what
    assert "No data loss found." in review.as_dict()["headline"]


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


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an app in another repository, with an environment in the folder above it."""
    repository = tmp_path / "theirs"
    app = repository / "apps" / "vision"
    app.mkdir(parents=True)
    git(repository, "init", "--quiet")
    (app / "cdk.json").write_text("{}")
    (repository / ".gitignore").write_text(".venv\nnode_modules\n")
    (app / "requirements.txt").write_text("aws-cdk-lib==2.1.0\ntraining-stack==0.1.0\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "an app")
    (repository / "node_modules").mkdir()
    program(app / ".venv/bin/npx", f"echo $0 >{tmp_path / 'npx'}")
    # Stand-ins for what would ask a registry.
    program(tmp_path / "bin/npm", "mkdir node_modules")
    program(tmp_path / "bin/python3", "mkdir -p .venv/bin; ln -s /bin/true .venv/bin/pip")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return app


def test_the_base_has_heads_environment_where_head_has_it(theirs: Path, tmp_path: Path) -> None:
    with base_checkout(theirs, "HEAD") as checkout:
        assert (checkout / ".venv").resolve() == theirs / ".venv"
        assert (checkout / "../../node_modules").resolve() == theirs.parents[1] / "node_modules"
        synthesize(checkout, tmp_path / "out", [], "base")
        called = (tmp_path / "npx").read_text()
        assert called == f"{checkout}/.venv/bin/npx\n", "nobody need activate it"


@pytest.mark.parametrize(
    "requirement",
    [
        "training-stack==0.2.0",
        "dist/training_stack-0.2.0-py3-none-any.whl",
        "git+https://github.com/somebody/training@0123456789abcdef",
    ],
)
def test_an_upgrade_of_the_stacks_gets_an_environment_of_the_base(
    theirs: Path, requirement: str
) -> None:
    (theirs / "requirements.txt").write_text(f"aws-cdk-lib==2.1.0\n{requirement}\n")
    with base_checkout(theirs, "HEAD") as checkout:
        assert (checkout / ".venv/bin/pip").exists() and not (checkout / ".venv").is_symlink()
        assert not (theirs / ".venv/bin/pip").exists()
        assert (checkout / "node_modules").is_dir()


def test_an_upgrade_runs_the_bases_make_setup_if_it_has_one(theirs: Path) -> None:
    (theirs / "Makefile").write_text("setup:\n\ttouch made\n")
    git(theirs, "add", "Makefile")
    git(theirs, "commit", "--quiet", "--message", "a Makefile")
    (theirs / "requirements.txt").write_text("training-stack==0.2.0\n")
    with base_checkout(theirs, "HEAD") as checkout:
        assert (checkout / "made").exists() and not (checkout / ".venv").exists()


def test_fails_for_an_upgrade_whose_base_cannot_be_set_up(theirs: Path, tmp_path: Path) -> None:
    program(tmp_path / "bin/npm", "echo no package-lock.json >&2; exit 1")
    (theirs / "requirements.txt").write_text("training-stack==0.2.0\n")
    with (
        pytest.raises(CannotReview, match=r"their setup failed at HEAD: no package-lock"),
        base_checkout(theirs, "HEAD"),
    ):
        pass
