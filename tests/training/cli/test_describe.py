"""What a workload is made of, as JSON, and one sentence for each mistake in one of your own."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.training import documented
from tests.training.forked import command
from training.cli.main import main
from training.cli.run import import_from


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's workload in a folder; this process's paths are restored."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.delitem(sys.modules, "moons", raising=False)
    return str(documented.own_workload(tmp_path / "mine", "NUMBER = 1"))


def test_it_says_recipe_stages_data_and_footprints(own: str) -> None:
    arguments = ["--recipe=small", "--override=epochs=2", "--measure"]
    code, out, err = command(["describe", "moons:MOONS", "--source", own, *arguments])
    assert code == 0, err
    said = json.loads(out)
    assert said["stages"] == {"classify": 30}
    assert (said["recipe"], said["num_samples"], said["makes_data"]) == ("small", 300, True)
    assert {row["epochs"] for row in said["footprints"]} == {2}


def test_a_known_workload_says_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "growth", "--recipe=laptop"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said["stages"]) == ["dense", "experts", "grown"] and said["footprints"] == []


def test_fails_for_everything_that_does_not_fit_a_dataset_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "manifest.json"
    meta = {"classes": ["wall", "room", "door"], "most_objects": 115}
    manifest.write_text(json.dumps({"files": [], "meta": meta}))
    command = ["describe", "detection", "--recipe=laptop", f"--manifest={manifest}"]
    wrong = ["--override=num_classes=2", "--override=num_queries=60"]
    assert main([*command, *wrong]) == 2
    said = capsys.readouterr().err
    assert "the dataset has 3 (wall, room, door); pass --override num_classes=3; also: " in said
    assert "an image has 115 objects" in said and "pass --override num_queries=115" in said
    assert main([*command, "--override=num_queries=120"]) == 0, "classes follow from the dataset"


def test_without_a_measurement_it_says_why(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = Path(own, "moons.py")
    module.write_text(module.read_text() + "\n\nMoons.nominal_samples = {}\n")
    assert main(["describe", "moons:MOONS", "--source", own, "--measure"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["stages"] == {"classify": None}
    assert said["footprints"] == [] and "its `nominal_samples` lack" in said["why_unmeasured"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["moon:MOONS"], "workload 'moon:MOONS': module 'moon' was not found; check its name"),
        (["./moons.py:MOONS"], "module './moons.py' is a path; write moons:MOONS, and run"),
        (["moons:MOON"], "workload 'moons:MOON': module moons has no 'MOON'; did you mean 'MOONS'"),
        (["keyword:MOONS"], "module keyword has no 'MOONS'; none is known; add it"),
        (["moons:Moons"], "workload 'moons:Moons' is a class; name an object: MOONS = Moons()"),
        (["moons:NUMBER"], "workload 'moons:NUMBER' is an instance of int; let that class"),
        (["moons:MOONS", "--recipe=smal"], "workload 'moons' has no recipe 'smal'; did you mean"),
        (["moons:MOONS", "--override=widht=3"], "has no field 'widht'; did you mean 'width'"),
        (["moons:MOONS", "--override=num_threads=0"], "num_threads is 0; give at least 1"),
        (["moons:MOONS", "--override=num_threads=1025"], "is 1025; give at least 1, at most 1024"),
    ],
)
def test_fails_with_one_sentence(
    own: str, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", *arguments, "--source", own]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert sentence in said


@pytest.mark.parametrize("last", ["width=0", "width=8"])
def test_fails_for_any_of_many_overrides(
    last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    also = tmp_path / "also.json"
    also.write_text(json.dumps([["seed=2"], ["seed=3", last]]))
    code = 2 if last == "width=0" else 0
    assert main(["describe", "growth", "--override=seed=1", f"--also={also}"]) == code
    said = "invalid overrides {'seed': '3', 'width': '0'}: width is 0"
    assert (said in capsys.readouterr().err) == (code == 2)


def test_ranks_and_workers_import_from_the_folder_too_and_the_trainer_stays_the_trainer(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.path[0]
    import_from(Path(own))
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["elsewhere", own])
    assert sys.path[:2] == [before, own]
    assert main(["describe", "moons:MOONS", "--source", "no/such"]) == 2
    assert "the source folder no/such does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "not JSON", "[]"])
def test_fails_for_a_manifest_that_is_none(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "manifest.json"
    if content is not None:
        manifest.write_text(content)
    assert main(["describe", "growth", f"--manifest={manifest}"]) == 2
    assert f"--manifest {manifest}" in capsys.readouterr().err
