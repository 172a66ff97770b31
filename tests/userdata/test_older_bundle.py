"""A replacement's run.env may know more than the bundle that its run began with."""

import zipfile
from pathlib import Path

import pytest

from userdata import run_env
from userdata.older_bundle import EXAMPLE, main


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """The example itself, and a name that it does not have yet."""
    path = tmp_path / "run.env"
    path.write_text(run_env.EXAMPLE.read_text() + 'FROM_TOMORROW="a=b c=d"\n')
    return path


def bundle_of(tmp_path: Path, example: str) -> Path:
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(EXAMPLE, example)
    return path


def test_what_an_older_bundle_would_refuse_is_taken_out_and_named(
    newer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = run_env.read_run_env(newer)
    assert any("FROM_TOMORROW" in fault for fault in run_env.find_faults(before))
    bundle = bundle_of(tmp_path, run_env.EXAMPLE.read_text())
    monkeypatch.setattr("sys.argv", ["older_bundle", str(newer), str(bundle)])
    assert main() == 0
    after = run_env.read_run_env(newer)
    assert run_env.find_faults(after) == []
    assert before.keys() - after.keys() == {"FROM_TOMORROW"}
    assert all(before[name] == value for name, value in after.items())
    assert "ignoring FROM_TOMORROW, unknown to the run's older bundle" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.zip", "run.env"]


def test_a_bundle_that_knows_every_name_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.env"
    path.write_text(run_env.EXAMPLE.read_text())
    bundle = bundle_of(tmp_path, run_env.EXAMPLE.read_text())
    monkeypatch.setattr("sys.argv", ["older_bundle", str(path), str(bundle)])
    assert main() == 0
    assert run_env.read_run_env(path) == run_env.read_run_env(run_env.EXAMPLE)
    assert capsys.readouterr().out == ""
