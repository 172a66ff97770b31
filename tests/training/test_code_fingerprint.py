"""An edit changes the fingerprint of exactly those stages whose results it could change."""

import shutil
from pathlib import Path

import pytest

from tests.training.hooks import interrupt_at
from tests.training.runs import Run
from training import numerics


def fingerprint(module: str) -> str:
    """Of what can reach a shard of a stage in `module`; computed anew."""
    return numerics.code_fingerprint.__wrapped__(module, "artifacts")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of training/ whose sources are hashed, and a user's module beside it."""
    packages = {"training": tmp_path / "training", "moons": tmp_path / "moons.py"}
    shutil.copytree(numerics._root("training"), packages["training"])
    packages["moons"].write_text("STAGE = 1")
    monkeypatch.setattr(numerics, "_root", packages.__getitem__)
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "training/durable/report/page.py",
        "training/engine/loop.py",
        "training/cli/main.py",
        "training/durable/save/write.py",
    ],
)
@pytest.mark.parametrize("module", ["moons", "training.workloads.trajectory.features"])
def test_code_that_cannot_reach_a_shard_does_not_change_the_key(
    sources: Path, path: str, module: str
) -> None:
    before = fingerprint(module)
    (sources / path).write_text("# edited")
    assert fingerprint(module) == before


@pytest.mark.parametrize(
    "path",
    [
        *("training/numerics.py", "training/artifacts/prepare.py"),
        "training/durable/sources.py",
    ],
)
@pytest.mark.parametrize("module", ["moons", "training.workloads.trajectory.features"])
def test_code_that_every_stage_may_use_changes_the_key(
    sources: Path, path: str, module: str
) -> None:
    before = fingerprint(module)
    (sources / path).write_text("# edited")
    assert fingerprint(module) != before


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("moons.py", "moons"),
        ("training/workloads/trajectory/features.py", "training.workloads.trajectory.features"),
        (
            "training/workloads/trajectory/magvit/model.py",
            "training.workloads.trajectory.features",
        ),
    ],
)
def test_the_stage_s_own_code_changes_its_key_alone(sources: Path, path: str, module: str) -> None:
    (other,) = {"moons", "training.workloads.trajectory.features"} - {module}
    before = fingerprint(module), fingerprint(other)
    (sources / path).write_text("# edited")
    assert fingerprint(module) != before[0]
    assert fingerprint(other) == before[1]


def test_a_run_whose_code_was_edited_between_attempts_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "edited_workload.py"
    source.write_text("from tests.training.tiny import TINY as EDITED\n")
    monkeypatch.syspath_prepend(tmp_path)
    # In processes of their own, which import the module as it is then.
    interrupt_at("first", 5)
    attempt = run.fork("--workload=edited_workload:EDITED")
    attempt.join()
    assert attempt.exitcode == 75
    source.write_text(source.read_text() + "# a comment may change a result for all we know\n")
    attempt = run.fork("--workload=edited_workload:EDITED")
    attempt.join()
    assert attempt.exitcode == 0
    assert "[resume] results may differ: the run began with another code" in capfd.readouterr().out
    assert run.json("receipt.json")["numerics_changed"] == ["code"]
