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


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of training/, and a user's module beside it."""
    root = tmp_path_factory.mktemp("sources")
    shutil.copytree(numerics._root("training"), root / "training")
    (root / "moons.py").write_text("STAGE = 1")
    return root


@pytest.fixture
def sources(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copy is what is hashed."""
    packages = {"training": copied / "training", "moons": copied / "moons.py"}
    monkeypatch.setattr(numerics, "_root", packages.__getitem__)
    return copied


MODULES = ("moons", "training.workloads.trajectory.features")


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        # Code that cannot reach a shard.
        ("training/durable/report/page.py", [False, False]),
        ("training/engine/loop.py", [False, False]),
        ("training/cli/main.py", [False, False]),
        ("training/durable/save/tensors/checkpointer.py", [False, False]),
        # What every stage may use.
        ("training/artifacts/prepare.py", [True, True]),
        ("training/numerics.py", [True, True]),
        ("training/durable/sources.py", [True, True]),
        # A stage's own.
        ("moons.py", [True, False]),
        ("training/workloads/trajectory/features.py", [False, True]),
        ("training/workloads/trajectory/magvit/model.py", [False, True]),
    ],
)
def test_code_changes_the_keys_of_those_whose_shards_it_can_reach(
    sources: Path, path: str, changed: list[bool]
) -> None:
    before = [fingerprint(module) for module in MODULES]
    text = (sources / path).read_text()
    (sources / path).write_text("# edited")
    after = [fingerprint(module) for module in MODULES]
    (sources / path).write_text(text)
    assert [a != b for a, b in zip(after, before, strict=True)] == changed


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
