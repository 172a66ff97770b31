"""The program of a run: read back as it was written, or refused with one sentence."""

import json
from typing import Any

import pytest

from contract.errors import UserError
from contract.program import Program

WHOLE = Program(
    command="python train.py --name 'two words'",
    hyperparameters={"epochs": "3", "learning-rate": "0.1"},
    environment={"TOKENIZERS_PARALLELISM": "false"},
    channels=("train", "validation"),
    working_folder="scripts",
    requirements="more.txt",
    interpreter="/usr/bin/python3.12",
    notice_signal="SIGUSR1",
    quiet_seconds=2.5,
    metric_definitions=(("train:loss", r"loss: ([0-9.]+)"),),
)


def test_a_program_is_read_back_as_it_was_written() -> None:
    assert Program.from_json(WHOLE.to_json()) == WHOLE


def test_a_command_alone_is_a_program() -> None:
    program = Program.from_json('{"command": "python train.py --epochs 3"}')
    assert program == Program(command="python train.py --epochs 3")
    assert program.words == ("python", "train.py", "--epochs", "3")
    assert (program.channels, program.notice_signal) == (("training",), "SIGTERM")


def test_numbers_of_hyperparameters_may_be_written_as_numbers() -> None:
    program = Program.from_json('{"command": "x", "hyperparameters": {"epochs": 3, "f": true}}')
    assert program.hyperparameters == {"epochs": "3", "f": "true"}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"command": "  "}, "the program is empty"),
        ({"command": "python 'train.py"}, "No closing quotation"),
        (
            {"command": "cd src && python train.py"},
            "bash -eo pipefail -c 'cd src && python train.py'",
        ),
        ({"command": "python a.py; python b.py"}, "only a shell understands"),
        ({"command": "OMP_NUM_THREADS=1 python a.py"}, "--env NAME=VALUE"),
        ({"command": "python a.py --db postgres://u:p@h/d"}, "an address with a password in it"),
        ({"command": "python a.py --db p://u:pa$s@h/d"}, "an address with a password in it"),
        ({"hyperparameters": {"two words": "1"}}, "'two words' is not a valid name"),
        ({"hyperparameters": {"sagemaker_program": "x"}}, "reserved by SageMaker"),
        ({"hyperparameters": {"text": "x" * 2501}}, "2501 characters"),
        ({"environment": {"SM_MODEL_DIR": "/tmp"}}, "belongs to the container contract"),
        ({"environment": {"TRAINING_COMMIT_FILE": "x"}}, "belongs to the container contract"),
        ({"environment": {"WANDB_API_KEY": "x"}}, "looks like a secret"),
        ({"environment": {"AWS_ACCESS_KEY_ID": "x"}}, "looks like a secret"),
        ({"environment": {"A-B": "x"}}, "'A-B' is not a valid name"),
        ({"channels": []}, "give 1 to 20"),
        ({"channels": ["train", "TRAIN"]}, "have the same name"),
        ({"channels": ["../x"]}, "'../x' is not a valid name"),
        ({"channels": [".."]}, "'..' is not a valid name"),
        ({"working_folder": "../other"}, "not within the source folder"),
        ({"working_folder": "/etc"}, "not within the source folder"),
        ({"interpreter": "python -u"}, "not a single word"),
        ({"notice_signal": "SIGKILL"}, "use one of SIGTERM"),
        ({"quiet_seconds": 0}, "a number above 0"),
        ({"metric_definitions": [["loss", "loss: [0-9]+"]]}, "put the number in parentheses"),
        ({"metric_definitions": [["loss", "("]]}, "which is not valid"),
        ({"metric_definitions": [["a=b", "(x)"]]}, "'a=b' is not a valid name"),
    ],
)
def test_fails_with_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as failure:
        Program.from_json(json.dumps({"command": "python train.py", **wrong}))
    assert sentence in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        (r'{"command": "x \ud800"}', r"is not JSON ('utf-8' codec can't encode character '\ud800'"),
        (r'{"command": "x", "hyperparameters": {"a": ["\ud800"]}}', "surrogates not allowed"),
        ("{}", 'has no "command"'),
        ('{"command": "x", "format": 9}', "has format 9"),
        ('{"command": "x", "comand": "y"}', "'comand', which is unknown"),
        ('{"command": 3}', "command 3; use a string"),
        ('{"command": "x", "channels": "train"}', "use a list of names"),
        ('{"command": "x", "quiet_seconds": "10"}', "use a number"),
        ('{"command": "x", "quiet_seconds": true}', "use a number"),
        ('{"command": "x", "metric_definitions": {"a": "b"}}', "or [name, regular expression]"),
        ('{"command": "x", "metric_definitions": [{"Name": "a"}]}', '{"Name": ..., "Regex": ...}'),
    ],
)
def test_fails_to_read_another_document(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=r"program\.json") as failure:
        Program.from_json(text)
    assert sentence in str(failure.value)
