"""The wheel of the stacks, as another CDK app imports it: the same bundle, its network and tags."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent
APP = REPOSITORY / "examples" / "cdk_app"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the wheel in a folder, built from a copy: setuptools leaves files."""
    tree, site = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("site")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and (REPOSITORY / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tree / name, follow_symlinks=False)
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
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {
        path.name.removesuffix(".template.json"): json.loads(path.read_text())
        for path in sorted((out / "cdk.out").glob("*.template.json"))
    } | {"assets": sorted(path.name for path in (out / "cdk.out").glob("asset.*"))}


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
