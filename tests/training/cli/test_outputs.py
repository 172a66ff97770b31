"""A place where nothing can be written is refused in one sentence, before any work is done."""

import resource
from pathlib import Path

import pytest

from tests.training.runs import WORKLOAD, Run
from training.cli.main import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    return path


@pytest.mark.parametrize(
    "command", ["export", "report", "predict", "evaluate", "tensorboard", "data sync"]
)
def test_fails_below_a_file(
    command: str, whole: Run, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_arguments(command, whole, file / "below")) == 2
    said = capsys.readouterr().err
    if command in ("export", "report", "predict"):
        says = f"{file} is a file; name a folder"
    else:
        says = f"cannot write to {file / 'below'}: Not a directory; use another path"
    assert said == f"error: {says}\n"
    assert file.read_text() == "precious"


def test_fails_below_a_file_for_another_library_and_for_scratch(
    whole: Run, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = file / "below"
    assert main([*_arguments("export", whole, below), "--format=dcp"]) == 2
    assert capsys.readouterr().err == f"error: {file} is a file; name a folder\n"
    evaluate = ["evaluate", f"--run-uri={whole.uri}", f"--dataset-uri={whole.dataset}"]
    assert main([*evaluate, f"--scratch={below}"]) == 2
    assert f"cannot write to {below}: Not a directory; use" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["measure", "count"])
def test_fails_before_it_counts_for_a_file_that_is_no_file_of_footprints(
    command: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"measure": [f"--workload={WORKLOAD}", "--recipe=quick"], "count": ["models:linear"]}
    (tmp_path / "other.json").write_text('{"format": 2}')
    for out, says in (
        (tmp_path, f"{tmp_path} is a folder; name a file to write"),
        (file, f"{file} is not a file of footprints (JSONDecodeError("),
        (tmp_path / "other.json", "other.json is not a file of footprints (KeyError('torch'));"),
        (file / "below", f"the folder {file} does not exist; create it, or pass another --out"),
    ):
        assert main([command, *words[command], f"--out={out}"]) == 2
        said = capsys.readouterr()
        assert says in said.err and said.out == ""
    assert main(["measure", *words["measure"], "--check", f"--out={file}"]) == 2
    assert "is not a file of footprints" in capsys.readouterr().err
    assert file.read_text() == "precious"


@pytest.mark.parametrize("command", ["export", "report", "predict"])
def test_fails_for_a_folder_where_a_file_is_written(
    command: str, whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_arguments(command, whole, tmp_path)) == 2
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path} is a folder; name a file to write\n"
    assert list(tmp_path.iterdir()) == []


def test_fails_for_a_dataset_in_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(file)]) == 2
    assert f"the dataset folder {file} is a file; make one with" in capsys.readouterr().err
    assert main(["data", "make", f"--workload={WORKLOAD}", f"--out={file}", "--count=9"]) == 2
    assert f"{file} is a file; use a new folder" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_made_dataset_that_would_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    make = ["data", "make", f"--workload={WORKLOAD}", f"--out={out}", "--count=99"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert main(make) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{out} cannot be written: File too large; what was made has been deleted" in said
    assert main(make) == 0


def test_a_full_disk_says_that_what_can_be_continued_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    make = ["data", "make", "--workload=imagenet", f"--out={out}", "--count=80"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, before[1]))
    try:
        assert main(make) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "File too large; the same command continues from what was made: make room" in said
    assert main(make) == 0


@pytest.mark.parametrize("option", ["--scratch", "--metrics-file"])
def test_fails_for_a_run_that_could_not_write_beside_itself(
    option: str, whole: Run, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [f"--run-uri={tmp_path / 'run'}", f"--dataset-uri={whole.dataset}"]
    place = file / "below" / "it"
    assert main(["run", f"--workload={WORKLOAD}", "--recipe=quick", *run, f"{option}={place}"]) == 2
    assert "Not a directory; use another path" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def _arguments(command: str, run: Run, out: Path) -> list[str]:
    uri = [] if command == "data sync" else [f"--run-uri={run.uri}"]
    data = [f"--dataset-uri={run.dataset}"]
    has_data = command in ("predict", "evaluate", "data sync")
    return [*command.split(), *uri, *(data if has_data else []), f"--out={out}"]
