"""run.env: one contract for writer, example and readers."""

from itertools import pairwise
from pathlib import Path

import pytest

from contract.run_env import NAMES
from stacks.parameters import StackParameters
from stacks.user_data import run_env
from tests.userdata.rig import USERDATA
from userdata.run_env import find_faults, read_run_env

EXAMPLE = USERDATA / "run.env.example"


def example(**changes: str) -> dict[str, str]:
    return {**read_run_env(EXAMPLE), **changes}


def test_example_is_itself_a_good_run_env() -> None:
    assert find_faults(example()) == []
    assert tuple(example()) == NAMES


def test_writer_and_example_have_the_same_names() -> None:
    written = run_env(
        StackParameters.for_size("g5.xlarge"),
        prediction="size=g5.xlarge hours_p50=0.2",
        dataset_uri="s3://datasets/trajectory",
        run_uri="s3://runs/runs/run-1",
        bundle_uri="s3://assets/bundle.zip",
        stack_name="TrainingStack",
        region="us-east-1",
        fleet_parameter="/TrainingStack/fleet-id",
    )
    assert written.keys() == example().keys()
    assert find_faults(written) == []


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
        ("CHECKPOINTS_KEPT", "3, 10epochs"),
        ("LEASE_TTL_SECONDS", "0"),
        ("NOTICE_POLICY", "go"),
        ("OVERRIDES", "a=b c=d"),
        ("RECIPE", '"full"'),
        ("WORKLOAD", ""),
    ],
)
def test_fails_on_an_impossible_value_by_its_name(name: str, value: str) -> None:
    (fault,) = find_faults(example(**{name: value}))
    assert fault.startswith(f"{name} has to be ")
    assert repr(value) in fault


@pytest.mark.parametrize(
    ("name", "value"), [("CHECKPOINT_INTERVAL", "often"), ("CHECKPOINTS_KEPT", "all")]
)
def test_fails_in_the_words_that_the_trainer_uses(name: str, value: str) -> None:
    (fault,) = find_faults(example(**{name: value}))
    assert fault.startswith(f"{name}: the checkpoint")
    assert f"{value!r}" in fault


def test_fails_on_a_line_that_is_no_variable(tmp_path: Path) -> None:
    path = tmp_path / "run.env"
    path.write_text("RUN_ID=run-1\nnot a variable\n")
    with pytest.raises(ValueError, match=r"line 2 of .* is not NAME=value: 'not a variable'"):
        read_run_env(path)
