"""The parameters of a program: what it takes the place of, and what is refused in one sentence."""

from pathlib import Path

import pytest

from stacks.parameters import StackParameters
from stacks.parameters.__main__ import explain
from stacks.parameters.programs import program_of


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "digits/nets").mkdir(parents=True)
    for name in ("digits/train.py", "digits/nets/train.py"):
        (tmp_path / name).touch()
    return str(tmp_path / "digits")


def given(folder: str, **others: object) -> StackParameters:
    return StackParameters.for_size(
        "g5.xlarge", **{"program": "python train.py", "source": folder, **others}
    )


def test_a_program_is_a_workload_of_its_own_with_its_folders_name_as_dataset(source: str) -> None:
    parameters = given(source)
    assert (parameters.workload, parameters.recipe) == ("program", "program")
    assert (parameters.overrides, parameters.dataset) == ((), "digits")
    # No plan is known: the limits are those of a run without one.
    assert (parameters.max_hours, parameters.max_usd) == (72, 73)


def test_each_named_value_reaches_the_program_as_its_text(source: str) -> None:
    context = {
        "env": {"MODE": "slow", "LEVEL": 3},
        "env.MODE": "fast",
        "hyperparameter.lr": "0.1",
        "metric.loss": "loss: ([0-9.]+)",
        "channels": "train,validation",
        "quiet_seconds": "2.5",
        "notice_signal": "SIGUSR1",
        "working_folder": "nets",
    }
    program = program_of(given(source, **context))
    assert program.environment == {"MODE": "fast", "LEVEL": "3"}
    assert program.hyperparameters == {"lr": "0.1"}
    assert program.metric_definitions == (("loss", "loss: ([0-9.]+)"),)
    assert program.channels == ("train", "validation")
    assert (program.quiet_seconds, program.notice_signal) == (2.5, "SIGUSR1")


def test_the_table_shows_them_with_their_origin(source: str) -> None:
    rows = explain("g5.xlarge", {"program": "x", "source": source, "env.MODE": "fast"})
    shown = {row["name"]: (row["value"], row["origin"]) for row in rows}
    assert shown["env"] == ((("MODE", "fast"),), "requested")
    assert shown["workload"] == ("program", "what runs a program")


@pytest.mark.parametrize(
    ("context", "sentence"),
    [
        ({"source": ""}, "program is 'python train.py'; give source=FOLDER, which has its files"),
        ({"source": "no/such"}, "source is 'no/such', which is not a folder"),
        ({"working_folder": "src"}, "working_folder is 'src', but there is no folder"),
        ({"working_folder": ".."}, "the working folder '..' is not within the source folder"),
        ({"requirements": "more.txt"}, "requirements is 'more.txt', which is not a file in"),
        ({"program": "python -u trian.py"}, "there is no file 'trian.py' in"),
        ({"recipe": "laptop"}, "recipe is 'laptop', which a program does not have; drop it: give"),
        ({"overrides": "lr=1"}, "overrides is 'lr=1', which a program does not have"),
        ({"checkpoint_interval": "600s"}, "drop it: a program says itself when it saves"),
        ({"workload": "mine:CLIPS"}, "workload is 'mine:CLIPS' and program 'python train.py'"),
        ({"env.SM_NUM_GPUS": "1"}, "'SM_NUM_GPUS' belongs to the container contract"),
        ({"env.HF_TOKEN": "x"}, "'HF_TOKEN' looks like a secret"),
        ({"env.PIP_INDEX_URL": "https://me:x@a.b/c"}, "'PIP_INDEX_URL' has an address with a pass"),
        ({"metric.loss": "loss"}, "put the number in parentheses"),
        ({"notice_signal": "SIGKILL"}, "the notice signal 'SIGKILL' is unknown; known are SIGTERM"),
        ({"quiet_seconds": "0"}, "quiet_seconds is 0.0; give a number above 0"),
        ({"env": "MODE=fast"}, "env is 'MODE=fast'; give each as -c env.NAME=VALUE"),
        ({"enw.MODE": "x"}, r"context 'enw\.MODE' is unknown; did you mean env\.MODE\?"),
    ],
)
def test_fails_with_one_sentence(source: str, context: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        given(source, **context)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["source", "env.MODE", "channels", "interpreter", "metric.loss"])
def test_fails_on_what_only_a_program_has_without_one(name: str) -> None:
    own = name.partition(".")[0]
    with pytest.raises(ValueError, match=f"{own} is .*, which only a program has; give program="):
        StackParameters.for_size("g5.xlarge", **{name: "x"})
