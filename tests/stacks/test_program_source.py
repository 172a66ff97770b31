"""A program in the bundle: the spec that boot reads, its files and what to install."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from contract.program import Program
from contract.run_env import find_fault
from stacks.parameters import StackParameters
from stacks.program_source import write_source
from tests.stacks.conftest import Synthesize
from tests.stacks.templates import sample_run_env


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    for name in ("train.py", "nets/model.py", "requirements.txt", "__pycache__/train.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def parameters(source: Path, **others: object) -> StackParameters:
    given = {"program": "python train.py", "source": str(source), **others}
    return StackParameters.for_size("g5.xlarge", **given)


def test_the_bundle_has_the_program_its_source_and_what_to_install(
    source: Path, tmp_path: Path
) -> None:
    spec = {"command": "python train.py --lr 1", "environment": {"MODE": "fast"}}
    (source / "program.json").write_text(json.dumps(spec))
    write_source(parameters(source), tmp_path / "bundle")
    program = Program.from_json((tmp_path / "bundle/program/program.json").read_text())
    assert (program.command, program.environment) == ("python train.py", {"MODE": "fast"})
    assert (tmp_path / "bundle/program/source/nets/model.py").read_text() == "nets/model.py"
    requirements = tmp_path / "bundle/program/requirements.txt"
    assert requirements.read_text() == "-r source/requirements.txt\n"
    (source / "my reqs.txt").write_text("numpy\n")
    (source / "program.json").write_text(json.dumps({**spec, "requirements": "my reqs.txt"}))
    write_source(parameters(source), tmp_path / "words")
    listed = (tmp_path / "words/program/requirements.txt").read_text()
    assert listed == "-r 'source/my reqs.txt'\n"
    (source / "program.json").write_text('{"command": "python train.py", "requirements": ""}')
    write_source(parameters(source), tmp_path / "nothing")
    assert not (tmp_path / "nothing/program/requirements.txt").exists()


def test_an_archive_of_files_alone_says_which_folders_are_empty(
    source: Path, tmp_path: Path
) -> None:
    (source / "out/plots").mkdir(parents=True)
    write_source(parameters(source), tmp_path / "bundle")
    written = (tmp_path / "bundle/program/empty_folders.json").read_text()
    assert json.loads(written) == [".", "out/plots"]


def test_fails_on_requirements_that_git_ignores(source: Path, tmp_path: Path) -> None:
    git = ["git", "init", "--quiet"]
    own = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(git, cwd=source, env=own, check=True)
    (source / ".gitignore").write_text("*.txt\n")
    with pytest.raises(ValueError, match="which git ignores or which lies"):
        write_source(parameters(source), tmp_path / "bundle")


def test_the_machines_run_env_says_that_a_program_trains(source: Path) -> None:
    variables = sample_run_env(parameters(source, run_id="mine"))
    assert (variables["WORKLOAD"], variables["RECIPE"]) == ("program", "program")
    assert [name for name, value in variables.items() if find_fault(name, value)] == []


def test_a_longer_run_may_read_the_run_that_it_begins_with(
    source: Path, synthesize: Synthesize
) -> None:
    spec = {"command": "python train.py", "init_from": "s3://bucket/runs/mine-1"}
    (source / "program.json").write_text(json.dumps(spec))
    given = {"program": "python train.py --epochs 9", "source": str(source)}
    found = json.dumps(synthesize(**given, dataset="mine", run_id="mine-2")["TrainingStack"])
    assert ":s3:::bucket/runs/mine-1/*" in found
    with pytest.raises(ValueError, match=r"name the run as s3://RUN-BUCKET/runs/ID"):
        (source / "program.json").write_text(json.dumps({**spec, "init_from": "runs/mine"}))
        parameters(source)
