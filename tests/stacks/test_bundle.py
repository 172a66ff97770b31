"""The code bundle: which files are in it, and what its name depends on."""

import hashlib
from pathlib import Path

import pytest
from aws_cdk import Stack

import app as cdk_app
from stacks.bundle import CodeBundle

FILES = [
    "userdata/requirements.txt",
    "contract/grammar.py",
    "training/cli/main.py",
    "training/workloads/trajectory/model.py",
    "userdata/steps/disk.sh",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in [*FILES, "stacks/app.py", "README.md"]:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(name)
    return tmp_path / "root"


def _bundled(
    root: Path, out: Path, wheels: Path | None = None, workload: str = ""
) -> tuple[str, list[str]]:
    app = cdk_app.App(outdir=str(out), builtin_cloud_formation_validation=False)
    stack = Stack(app, "Bundle")
    bundle = CodeBundle(stack, "Code", root=root, wheels=wheels, workload=workload)
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


def test_pinned_wheels_travel_along_and_others_stay(root: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("six-1.0-py3-none-any.whl", "old-0.1-py3-none-any.whl"):
        (wheels / name).write_text(name)
    digest = hashlib.sha256(b"six-1.0-py3-none-any.whl").hexdigest()
    pins = f"# Why.\nsix==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n"
    (root / "userdata/requirements.txt").write_text(pins)
    without, _ = _bundled(root, tmp_path / "without")
    before, files = _bundled(root, tmp_path / "before", wheels)
    assert files == sorted([*FILES, "userdata/wheels/six-1.0-py3-none-any.whl"])
    assert before != without
    # A wheel that nothing pins changes no hash, so nothing is deployed for it.
    (wheels / "more-2.0-py3-none-any.whl").write_text("more")
    after, _ = _bundled(root, tmp_path / "after", wheels)
    assert after == before


def test_wheels_of_one_workload_travel_with_it_alone_for_every_python_there_is(
    root: Path, tmp_path: Path
) -> None:
    wheels, hashes = tmp_path / "wheels", []
    wheels.mkdir()
    for name in ("coco-1.0-cp312-cp312-any.whl", "coco-1.0-cp313-cp313-any.whl"):
        (wheels / name).write_text(name)
        hashes.append(f" --hash=sha256:{hashlib.sha256(name.encode()).hexdigest()}")
    own = root / "userdata/requirements-detection/coco.txt"
    own.parent.mkdir()
    own.write_text(f"coco==1.0{''.join(hashes)}\n")
    (root / "userdata/requirements.txt").write_text("# Nothing.\n")
    _, files = _bundled(root, tmp_path / "out", wheels, "detection")
    assert [Path(name).name for name in files if name.endswith(".whl")] == sorted(
        path.name for path in wheels.iterdir()
    )
    _, files = _bundled(root, tmp_path / "other", wheels, "trajectory")
    assert not [name for name in files if name.endswith(".whl")]
    own.rename(root / "userdata/requirements-xxhash.txt")
    _, files = _bundled(root, tmp_path / "each", wheels, "trajectory")
    assert len([name for name in files if name.endswith(".whl")]) == len(hashes)


def test_a_package_without_its_wheel_is_named(root: Path, tmp_path: Path) -> None:
    (root / "userdata/requirements.txt").write_text(f"six==1.0 --hash=sha256:{'0' * 64}\n")
    stack = Stack(cdk_app.App(outdir=str(tmp_path / "out")), "Bundle")
    bundle = CodeBundle(stack, "Code", root=root, wheels=tmp_path / "nothing")
    assert bundle.packages_without_wheel == ["six"]
