"""The code bundle: which files are in it, and what its name depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
from aws_cdk import Stack

import app as cdk_app
from stacks.bundle import CodeBundle

FILES = [
    "contract/grammar.py",
    "training/cli/main.py",
    "training/trajectory/model.py",
    "userdata/steps/disk.sh",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in [*FILES, "stacks/app.py", "README.md"]:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(name)
    return tmp_path / "root"


def _bundled(root: Path, out: Path) -> tuple[str, list[str]]:
    app = cdk_app.App(outdir=str(out), builtin_cloud_formation_validation=False)
    bundle = CodeBundle(Stack(app, "Bundle"), "Code", root=root)
    folder = out / f"asset.{bundle.asset_hash}"
    files = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
    return bundle.asset_hash, files


def test_the_bundle_is_contract_training_and_userdata(root: Path, tmp_path: Path) -> None:
    _, files = _bundled(root, tmp_path / "out")
    assert files == sorted(FILES)


def test_what_does_not_run_changes_nothing(root: Path, tmp_path: Path) -> None:
    before, _ = _bundled(root, tmp_path / "before")
    for name in [
        "training/__pycache__/run.pyc",
        "training/tests/test_run.py",
        "training/proof/torture/command.py",
        "userdata/README.md",
        "stacks/more.py",
        ".git/HEAD",
    ]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    after, files = _bundled(root, tmp_path / "after")
    assert files == sorted(FILES)
    assert after == before


def test_what_runs_changes_the_name(root: Path, tmp_path: Path) -> None:
    before, _ = _bundled(root, tmp_path / "before")
    (root / FILES[1]).write_text("changed")
    after, _ = _bundled(root, tmp_path / "after")
    assert after != before
