"""The wheel of the stacks, as another CDK app imports it: the same bundle, its network and tags.

Others deploy that app, and run the review's action in its repository.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedded_aws import EmbeddedAws
from tests.embedded_aws.cdk_cli import NEVER

REPOSITORY = Path(__file__).parent.parent
APP = REPOSITORY / "examples" / "cdk_app"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository to build from: setuptools leaves files."""
    tree = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and (REPOSITORY / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tree / name, follow_symlinks=False)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the wheel in a folder."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "install", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*install, str(tree)], check=True)
    return site


def synthesize(app: Path, packages: Path, out: Path) -> dict[str, Any]:
    """The templates of an app in a folder of its own, and its manifest's assets."""
    folder = out / "app"
    shutil.copytree(app, folder)
    environment = {"PATH": str(Path(sys.prefix, "bin")), "PYTHONPATH": str(packages)}
    environment["CDK_OUTDIR"] = str(out / "cdk.out")
    environment["CDK_VALIDATION"] = os.environ["CDK_VALIDATION"]  # see tests/conftest.py
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {
        path.name.removesuffix(".template.json"): json.loads(path.read_text())
        for path in sorted((out / "cdk.out").glob("*.template.json"))
    } | {"assets": sorted(path.name for path in (out / "cdk.out").glob("asset.*"))}


@pytest.mark.slow
def test_another_app_deploys_the_stack_in_its_own_network_with_its_tags(
    wheel: Path, tmp_path: Path
) -> None:
    theirs = synthesize(APP, wheel, tmp_path / "wheel")
    ours = synthesize(APP, REPOSITORY, tmp_path / "repository")
    assert theirs == ours  # assets included, which are named by their contents
    assert len(theirs["assets"]) >= 2
    vision = theirs["Vision"]["Resources"]
    types = [each["Type"] for each in vision.values()]
    assert "AWS::EC2::SpotFleet" in types
    assert "AWS::EC2::VPC" not in types
    (topic,) = [each for each in vision.values() if each["Type"] == "AWS::SNS::Topic"]
    assert {"Key": "team", "Value": "vision"} in topic["Properties"]["Tags"]
    assert (tmp_path / "wheel" / "cdk.out" / "Vision.plan.json").exists()


class Stranger:
    """A repository of another team with the example, an environment with the wheel, and the CLI."""

    def __init__(self, folder: Path, packages: Path, **variables: str) -> None:
        self.folder = folder
        shutil.copytree(APP, folder)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=folder)
        (installed,) = folder.glob(".venv/lib/python*/site-packages")
        (installed / "wheel.pth").write_text(f"{packages}\n{sysconfig.get_path('purelib')}\n")
        (folder / "node_modules").symlink_to((REPOSITORY / "node_modules").resolve())
        (folder / ".gitignore").write_text(".venv\nnode_modules\n")
        found = f"{folder / '.venv' / 'bin'}:{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self.environment = {**kept, "PATH": found, **variables}
        self.run("git", "init", "--quiet")

    def run(self, *command: str, rc: int = 0, **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == rc, done.stdout
        return done.stdout

    def commit(self, **replaced: str) -> None:
        app = self.folder / "app.py"
        for old, new in replaced.items():
            assert old in app.read_text()
            app.write_text(app.read_text().replace(old, new))
        self.run("git", "add", ".")
        identity = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.com")
        self.run("git", *identity, "commit", "--quiet", "--message", "a change")


@pytest.mark.slow
def test_another_app_is_deployed_with_its_own_network_tags_and_environment(
    wheel: Path, tmp_path: Path
) -> None:
    with EmbeddedAws(region="eu-west-1") as aws:
        theirs = Stranger(tmp_path / "theirs", wheel, **aws.environment())
        theirs.commit(**{"111122223333": aws.account})
        cdk = ("npx", "--no-install", "cdk")
        theirs.run(*cdk, "bootstrap", f"aws://{aws.account}/eu-west-1", "--app", "")
        theirs.run(*cdk, "deploy", "--all", *NEVER)
        stacks = aws.client("cloudformation").describe_stacks()["Stacks"]
        names = {"CDKToolkit", "Platform", "VisionData", "Vision"}
        found = {each["StackName"] for each in stacks}
        assert {name for name in found if not name.startswith("SpotTraining-RunImage-")} == names
        (fleet,) = aws.client("ec2").describe_spot_fleet_requests()["SpotFleetRequestConfigs"]
        (template,) = aws.client("ec2").describe_launch_templates()["LaunchTemplates"]
        assert {"Key": "team", "Value": "vision"} in template["Tags"]
        private = {"Name": "tag:aws-cdk:subnet-type", "Values": ["Private"]}
        subnets = aws.client("ec2").describe_subnets(Filters=[private])["Subnets"]
        (launches,) = fleet["SpotFleetRequestConfig"]["LaunchTemplateConfigs"]
        used = {each["SubnetId"] for each in launches["Overrides"]}
        assert used == {each["SubnetId"] for each in subnets}
        assert len(used) == 2


@pytest.mark.slow
def test_the_review_runs_as_an_action_in_another_repository(
    tree: Path, wheel: Path, tmp_path: Path
) -> None:
    (step,) = yaml.safe_load((tree / "review" / "action.yml").read_text())["runs"]["steps"]
    # The action installs the project in an environment of its own; what that needs is here.
    packages = {"PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_DEPS": "1"}
    theirs = Stranger(tmp_path / "theirs", wheel, **packages, PIP_NO_BUILD_ISOLATION="0")
    # Nobody has activated theirs.
    theirs.environment["PATH"] = theirs.environment["PATH"].partition(":")[2]
    summary, output = tmp_path / "summary", tmp_path / "output"

    def review(rc: int) -> str:
        summary.unlink(missing_ok=True)
        theirs.run(
            *("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]),
            rc=rc,
            BASE="HEAD^",
            ARGUMENTS="",
            RUNNER_TEMP=str(tmp_path),
            GITHUB_ACTION_PATH=str(tree / "review"),
            GITHUB_OUTPUT=str(output),
            GITHUB_STEP_SUMMARY=str(summary),
        )
        assert f"comment={tmp_path / 'review.md'}" in output.read_text()
        assert (tmp_path / "review.md").read_text() == summary.read_text()
        return summary.read_text()

    theirs.commit()
    theirs.commit(**{'"g5.xlarge"': '"g5.2xlarge"'})
    assert "g5.2xlarge" in review(rc=0)
    theirs.commit(**{'"VisionData"': '"OtherData"'})
    assert "VisionData" in review(rc=1), "its buckets would go"
