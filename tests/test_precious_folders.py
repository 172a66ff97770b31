"""No command removes or replaces a user's file: each refuses in one sentence, and all stays.

What alone is replaced is a file that an option names (report, export, predict and review), as `cp`
does, and only once there is what to write: tests/training/cli/test_outputs.py.

Of commands that need a run first: tests/training/durable/program/test_job.py (export of a
snapshot), tests/training/durable/report/test_page.py (tensorboard), tests/operate/ (download).
"""

import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rehearsal.rehearsal_command as rehearsing
from operate.command import main as runs
from rehearsal.demo import deployment
from rehearsal.demo.deployment import DeployedStacks
from training.cli.main import main as training
from training.durable.store.dataset import StoredDataset
from training.durable.store.folder import FolderStore
from training.durable.store.local_dataset import LocalDataset

REPOSITORY = Path(__file__).parent.parent
MINE = {"thesis.tex": "precious", ".git/HEAD": "ref: refs/heads/main", "notes/a.txt": "mine"}


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder with a user's files."""
    folder = tmp_path / "work"
    for name, text in MINE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def kept(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def rehearse(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(rehearsing.sys, "argv", ["rehearsal", *arguments])
    return rehearsing.main()


@pytest.mark.parametrize(
    "words",
    [
        "data make --workload growth --count 4 --out",
        "data import README.md --workload growth --out",
        "data import docs --workload imagenet --out",
        "torture --kills 1 --out",
        "demo --out",
        "drill notice --out",
        "many --out",
        "tensorboard --run-uri RUN --out",
    ],
)
def test_fails_for_an_output_folder_with_a_user_s_files(
    words: str,
    precious: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = precious.parent / "run"
    arguments = [word.replace("RUN", str(run)) for word in words.split()] + [str(precious)]
    monkeypatch.chdir(REPOSITORY)
    if words.startswith("tensorboard"):
        _make_a_run(run)
    if words.startswith(("demo", "drill", "many")):
        monkeypatch.setattr(deployment, "EmbeddedAws", None)  # it begins with the folder
        assert rehearse(arguments, monkeypatch) == 2
    else:
        assert training(arguments) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert str(precious) in said[0]
    assert kept(precious) == MINE


def _make_a_run(folder: Path) -> None:
    """The least that counts as a run: a head and a config."""
    source = folder.parent / "program"
    source.mkdir()
    (source / "train.py").write_text("print(1)")
    options = ["--program=python train.py", f"--source={source}", f"--run-uri={folder}"]
    assert training(["run", *options, f"--ml-root={folder.parent / 'ml'}"]) == 0


def test_fails_to_sync_over_a_file_that_no_sync_has_put_there(
    precious: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "thesis.tex").write_text("somebody else's")
    LocalDataset.complete(dataset, "program", {})
    there = tmp_path / "there"
    StoredDataset(FolderStore(there)).upload(dataset, lambda done, total, size: None)
    sync = ["data", "sync", f"--dataset-uri={there}", f"--out={precious}"]
    assert training(sync) == 2
    assert f"{precious}/thesis.tex was not synced, and would be replaced" in capfd.readouterr().err
    assert kept(precious) == MINE
    (precious / "thesis.tex").unlink()
    assert training(sync) == 0
    assert kept(precious)["notes/a.txt"] == "mine", "beside other files it may go"


def test_what_is_there_is_never_replaced_by_a_download(
    precious: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _make_a_run(tmp_path / "run")
    (precious / "receipt.json").write_text("mine")
    before = kept(precious)
    for more in ([], ["--checkpoint=newest"]):
        assert runs(["download", str(tmp_path / "run"), f"--out={precious}", *more]) == 2
    assert kept(precious) == before
    assert capfd.readouterr().err.count("\n") >= 2


def test_the_embedded_aws_and_the_alarms_write_nothing_beside_their_own_file(
    precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Account:
        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> "Account":
            return self

        def __exit__(self, *_: object) -> None: ...

        def environment(self) -> dict[str, str]:
            return {"AWS_REGION": "us-east-1"}

        def exports(self) -> str:
            return "export AWS_REGION=us-east-1\n"

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    precious.rename(precious.with_name("out"))
    out = precious.with_name("out")
    monkeypatch.setattr(rehearsing, "REPOSITORY", out.parent)
    monkeypatch.setattr(rehearsing, "EmbeddedAws", Account)
    monkeypatch.setattr(DeployedStacks, "bootstrap", lambda self: None)
    monkeypatch.setattr(threading.Event, "wait", stop)
    assert rehearse(["aws", "--port=0"], monkeypatch) == 130
    own = {"aws-local.env": "export AWS_REGION=us-east-1\n", "aws-local/now/made-by-training": ""}
    assert kept(out) == {**MINE, **own}
    monkeypatch.setattr(rehearsing, "run_cdk", stop)
    assert rehearse(["alarms"], monkeypatch) == 130
    assert kept(out).keys() == {*MINE, *own}


def test_make_clean_removes_what_make_made_and_nothing_else(precious: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", precious.parent)
    out = precious.rename(precious.with_name("out"))
    for name in ("out/demo/made-by-training", "out/check/a", "out/aws-local.env", ".venv/.ready"):
        (out.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (out.parent / name).touch()

    def clean() -> str:
        command = ["make", "clean"]
        done = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, check=True)
        return done.stdout

    assert "out/ has files that make did not create; they stay" in clean()
    assert kept(out) == MINE
    assert sorted(path.name for path in out.parent.iterdir()) == ["Makefile", "out"]
    shutil.rmtree(out)
    assert "stay" not in clean()
