"""A program in a stack: what it takes the place of, its program.json, and what is refused."""

import json
from pathlib import Path

import pytest

from stacks.parameters import StackParameters
from stacks.parameters.__main__ import explain
from stacks.parameters.programs import program_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "digits/nets").mkdir(parents=True)
    for name in ("digits/train.py", "digits/nets/train.py"):
        (tmp_path / name).touch()
    return tmp_path / "digits"


def given(folder: Path, **others: object) -> StackParameters:
    return StackParameters.for_size(
        "g5.xlarge", **{"program": "python train.py", "source": str(folder), **others}
    )


def write_spec(folder: Path, **spec: object) -> Path:
    path = folder / "program.json"
    path.write_text(json.dumps({"command": "python train.py", **spec}))
    return path


def test_a_program_is_a_workload_of_its_own_with_its_folders_name_as_dataset(source: Path) -> None:
    parameters = given(source)
    assert (parameters.workload, parameters.recipe) == ("program", "program")
    assert (parameters.overrides, parameters.dataset) == ((), "digits")
    # No plan is known: the limits are those of a run without one.
    assert (parameters.max_hours, parameters.max_usd) == (72, 73)


def test_program_json_says_the_rest_and_may_be_all_that_is_given(source: Path) -> None:
    path = write_spec(source, environment={"MODE": "fast"}, working_folder="nets")
    parameters = StackParameters.for_size("g5.xlarge", program=str(path))
    assert (parameters.source, parameters.dataset) == (str(source), "digits")
    program = program_of(parameters)
    assert (program.command, program.working_folder) == ("python train.py", "nets")
    longer = program_of(given(source, program="python train.py --epochs 3"))
    assert (longer.command, longer.environment) == ("python train.py --epochs 3", {"MODE": "fast"})


def test_the_table_shows_where_they_come_from(source: Path) -> None:
    rows = explain("g5.xlarge", {"program": str(write_spec(source))})
    shown = {row["name"]: (row["value"], row["origin"]) for row in rows}
    assert shown["source"] == (str(source), "what runs a program")
    assert shown["workload"] == ("program", "what runs a program")


@pytest.mark.parametrize(
    ("context", "sentence"),
    [
        ({"source": ""}, "program is 'python train.py'; add source=FOLDER, the folder"),
        ({"source": "no/such"}, "source is 'no/such', which is not a folder"),
        ({"program": "mine.json"}, "program is 'mine.json', which cannot be read"),
        ({"program": "python -u trian.py"}, "has no file 'trian.py'"),
        ({"recipe": "laptop"}, "recipe is 'laptop', which a program does not have; drop it: write"),
        ({"overrides": "lr=1"}, "overrides is 'lr=1', which a program does not have"),
        ({"train.checkpoint_interval": "600s"}, "drop it: a program decides when it saves"),
        ({"train.nan_skips": "1"}, "train.nan_skips is '1', which a program does not have"),
        ({"workload": "mine:CLIPS"}, "workload is 'mine:CLIPS' and program 'python train.py'"),
    ],
)
def test_fails_with_one_sentence(source: Path, context: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        given(source, **context)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"working_folder": "src"}, "working_folder is 'src', but .* does not exist"),
        ({"working_folder": ".."}, "the working folder '..' is not within the source folder"),
        ({"requirements": "more.txt"}, "requirements is 'more.txt', which is not a file in"),
        ({"environment": {"HF_TOKEN": "x"}}, "'HF_TOKEN' looks like a secret"),
        (
            {"environment": {"PIP_INDEX_URL": "https://me:x@a.b/c"}},
            "'PIP_INDEX_URL' has an address with a pass",
        ),
        ({"quiet_second": 1}, "program.json has 'quiet_second', which is unknown"),
    ],
)
def test_fails_on_a_program_json_that_no_machine_could_run(
    source: Path, spec: dict[str, object], sentence: str
) -> None:
    write_spec(source, **spec)
    with pytest.raises(ValueError, match=sentence):
        given(source)


def test_fails_on_a_source_without_a_program(source: Path) -> None:
    with pytest.raises(
        ValueError, match=r"source is .*, which is for a program or a workload of your own; "
    ):
        StackParameters.for_size("g5.xlarge", source=str(source))
