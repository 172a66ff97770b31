"""The user data: the run.env contract, its size, and that it is a script bash takes."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.run_env import NAMES
from stacks import user_data
from stacks.parameters import StackParameters
from tests.stack_names import TRAINING
from tests.stacks.templates import only, sample_run_env


def _resolved(template: dict[str, Any]) -> str:
    """Return the user data with the longest names that CloudFormation could put in it."""
    data = only(template, "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]
    (join,) = data["UserData"].values()
    _, parts = join["Fn::Join"]
    longest = {"Fn::ImportValue": "b" * 63, "Ref": "ap-southeast-7"}
    return "".join(
        each if isinstance(each, str) else longest.get(*each) or str(each["Fn::Sub"])
        for each in parts
    )


@pytest.fixture(scope="module")
def script(templates: dict[str, Any]) -> str:
    return _resolved(templates["TrainingStack"])


def _written(script: str, root: Path) -> str:
    """Run the head of the user data, which writes the files, and return run.env."""
    end = "\nEND_OF_FILE\n"
    program = script[: script.rindex(end)] + end
    subprocess.run(["bash"], input=program, text=True, check=True, env={"MACHINE_ROOT": str(root)})
    return (root / "etc/training/run.env").read_text(encoding="utf-8")


def test_run_env_has_the_contract_s_names_and_the_decisions(script: str, tmp_path: Path) -> None:
    lines = _written(script, tmp_path).splitlines()
    values = dict(line.split("=", 1) for line in lines)
    added_at_boot = "BUNDLE_URI"
    assert list(values) == [name for name in NAMES if name != added_at_boot]
    assert values["RUN_URI"] == f"s3://{'b' * 63}/runs/run-1"
    assert values["DATASET_URI"] == f"s3://{'b' * 63}/trajectory"
    assert values["OVERRIDES"] == '""'
    assert values["PREDICTION"].startswith('"size=g5.2xlarge hours_p50=')
    assert values["DATA_DEVICE_NAME"] == "/dev/sdf"
    assert values["NUM_GPUS"] == "1"
    assert values["FLEET_PARAMETER"] == f"/{TRAINING}/fleet-id"


def test_a_machine_must_have_the_gpus_of_the_fleets_smallest_size() -> None:
    for mixed, least in ((False, "4"), (True, "1")):
        parameters = StackParameters.for_size("g5.12xlarge", mix_gpu_counts=mixed)
        assert sample_run_env(parameters)["NUM_GPUS"] == least


def test_several_words_stand_in_quotes(synthesize: Callable[..., Any], tmp_path: Path) -> None:
    options = {"train.nan_skips": "2", "train.keep": "3,10epochs"}
    templates = synthesize(overrides="settings.epochs=64 seed=2", **options)
    written = _written(_resolved(templates["TrainingStack"]), tmp_path)
    assert 'OVERRIDES="settings.epochs=64 seed=2"\n' in written
    assert 'TRAINER_OPTIONS="checkpoint_interval=auto keep=3,10epochs nan_skips=2"\n' in written


def test_first_boot_follows_verbatim(script: str) -> None:
    assert script.startswith("#!/bin/bash\n")
    assert script.endswith(user_data.FIRST_BOOT_FILE.read_text(encoding="utf-8"))


def test_bash_takes_the_script(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_longest_values_fit(
    synthesize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No recipe has fields of such names: they are left to the trainer, as where there is no torch.
    monkeypatch.setattr("stacks.parameters.checks.find_spec", lambda _: None)
    longest = " ".join(f"o{number:03}.{'n' * 20}={'v' * 13}" for number in range(49))
    templates = synthesize(overrides=longest, run_id="r" * 63, dataset="d" * 100)
    assert len(_resolved(templates["TrainingStack"]).encode()) < user_data.MAX_BYTES


def test_fails_when_the_user_data_grows_too_long() -> None:
    environment = sample_run_env(StackParameters.for_size("g5.xlarge"))
    with pytest.raises(ValueError, match=r"EC2 takes 16384: shorten"):
        user_data.render({**environment, "OVERRIDES": "o" * 12_000})
