"""run.env: one contract for writer, example and readers."""

from itertools import pairwise
from pathlib import Path

import pytest

from contract.run_env import NAMES
from stacks.parameters import StackParameters
from tests.stacks.templates import sample_run_env
from tests.userdata.rig import USERDATA
from userdata.run_env import find_faults, read_run_env

EXAMPLE = USERDATA / "run.env.example"


def example(**changes: str) -> dict[str, str]:
    """The example as boot reads it."""
    return {**read_run_env(EXAMPLE), **changes}


def test_example_is_itself_a_good_run_env() -> None:
    assert find_faults(example()) == []
    assert sorted(example()) == sorted(NAMES)


def test_writer_and_example_have_the_same_names() -> None:
    prediction = "size=g5.xlarge hours_p50=0.2"
    written = sample_run_env(StackParameters.for_size("g5.xlarge"), prediction=prediction)
    # What is added at boot.
    whole = {**written, "BUNDLE_URI": "s3://assets/bundle.zip"}
    assert whole.keys() == example().keys()
    assert find_faults(whole) == []


def test_example_documents_every_variable() -> None:
    lines = EXAMPLE.read_text().splitlines()
    undocumented = [
        line
        for before, line in pairwise(lines)
        if "=" in line and line[0] != "#" and not before.startswith("# ")
    ]
    assert undocumented == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATASET_URI", "bucket/prefix"),
        ("DATA_MOUNT", "data"),
        ("TRAINER_OPTIONS", "keep=3"),
        ("NOTICE_BUDGET_SECONDS", "0"),
        ("OVERRIDES", "a=b c=d"),
        ("RECIPE", '"full"'),
        ("WORKLOAD", ""),
    ],
)
def test_fails_on_an_impossible_value_by_its_name(name: str, value: str) -> None:
    (fault,) = find_faults(example(**{name: value}))
    assert fault.startswith(f"{name} must be ")
    assert repr(value) in fault


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("checkpoint_interval=often", "checkpoint_interval: the checkpoint interval 'often' cann"),
        ("keep=all", "keep: the checkpoints to keep, 'all', cannot be read"),
        ("lease_ttl_seconds=0", "lease_ttl_seconds: 0 is not a positive number"),
        ("notice_policy=go", "notice_policy: 'go' is unknown; use train-on or stop"),
        ("nan_skip=2", "nan_skip is not a trainer option; did you mean nan_skips?"),
    ],
)
def test_fails_in_the_words_that_the_trainer_uses(options: str, sentence: str) -> None:
    (fault,) = find_faults(example(TRAINER_OPTIONS=f'"{options}"'))
    assert fault.startswith(f"TRAINER_OPTIONS: {sentence}")


def test_fails_on_a_line_that_is_no_variable(tmp_path: Path) -> None:
    path = tmp_path / "run.env"
    path.write_text("RUN_ID=run-1\nnot a variable\n")
    with pytest.raises(ValueError, match=r"line 2 of .* is not NAME=value: 'not a variable'"):
        read_run_env(path)
