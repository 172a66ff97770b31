"""A replacement's run.env may know more than the bundle that its run began with."""

import zipfile
from pathlib import Path

import pytest

from userdata import run_env
from userdata.older_bundle import EXAMPLE, main

NEWER = 'FROM_TOMORROW="a=b c=d"\n'
TEXT = run_env.EXAMPLE.read_text()
KNOWN = '"checkpoint_interval=600s keep=4"'
OPTIONS = KNOWN[:-1] + ' nan_skips=1 watchdog_seconds=0"'


def rewritten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, example: str, options: str = KNOWN
) -> dict[str, str]:
    """The run.env of a newer template, after it was rewritten for a bundle with this example."""
    path, bundle = folder / "run.env", folder / "bundle.zip"
    given = {**run_env.read_run_env(run_env.EXAMPLE), "TRAINER_OPTIONS": options}
    run_env.write_run_env(path, given)
    path.write_text(path.read_text() + NEWER)
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr(EXAMPLE, example)
        archive.writestr("contract/__init__.py", "")
        names = 'OPTIONS = ["checkpoint_interval", "keep", "nan_skips"]\n'
        archive.writestr("contract/trainer_options.py", names)
    monkeypatch.setattr("sys.argv", ["older_bundle", str(path), str(bundle)])
    assert main() == 0
    assert sorted(each.name for each in folder.iterdir()) == ["bundle.zip", "run.env"]
    return run_env.read_run_env(path)


def test_what_an_older_bundle_would_refuse_is_taken_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after = rewritten(tmp_path, monkeypatch, TEXT, OPTIONS)
    assert run_env.find_faults(after) == []
    assert after["TRAINER_OPTIONS"] == KNOWN[:-1] + ' nan_skips=1"'
    sentence = "ignoring FROM_TOMORROW, train.watchdog_seconds, unknown to the run's older bundle"
    assert sentence in capsys.readouterr().out


def test_a_bundle_that_knows_every_name_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after = rewritten(tmp_path, monkeypatch, TEXT + NEWER)
    assert after["TRAINER_OPTIONS"] == KNOWN
    assert "FROM_TOMORROW" in after
    assert capsys.readouterr().out == ""
