"""The command that is started: its words, its interpreter, its variables."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.errors import UserError
from contract.program import Program
from training.durable.program.container import (
    ContainerHost,
    ProgramOptions,
    _Command,
    build_command,
)
from training.durable.store.folder import FolderStore

HOST = ContainerHost(num_gpus=4, num_cpus=48)


def command(
    tmp_path: Path, text: str, environ: Mapping[str, str] = os.environ, **fields: Any
) -> _Command:
    interpreter = fields.pop("wins", "")
    options = ProgramOptions(
        program=Program(command=text, **fields),
        source=tmp_path,
        dataset_uri=None,
        store=FolderStore(tmp_path / "run"),
        run_id="run",
        root=tmp_path / "ml",
        scratch=tmp_path,
        writer="here",
        interpreter=interpreter,
    )
    options.container.code.mkdir(parents=True, exist_ok=True)
    (options.container.code / "train.py").touch()
    return build_command(options, HOST, (), environ)


def test_python_is_the_interpreter_that_runs_this_project(tmp_path: Path) -> None:
    for name in ("python", "python3"):
        assert command(tmp_path, f"{name} train.py").words == (sys.executable, "train.py")


def test_another_interpreter_wins_and_its_folder_is_searched_first(tmp_path: Path) -> None:
    other = tmp_path / "venv" / "bin" / "python"
    other.parent.mkdir(parents=True)
    for path in (other, other.parent / "torchrun"):
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    found = command(tmp_path, "torchrun train.py", interpreter="/bin/sh", wins=str(other))
    assert found.variables["PATH"].split(os.pathsep)[0] == str(other.parent)
    assert command(tmp_path, "python train.py", wins=str(other)).words[0] == str(other)


def test_variables_of_the_contract_are_replaced_without_a_shell(tmp_path: Path) -> None:
    text = "env torchrun --nproc_per_node=$SM_NUM_GPUS ${SM_NUM_CPUS}x $HOME '${1}' cost$"
    words = command(tmp_path, text, hyperparameters={"lr": "0.1"}).words
    assert words[1:] == (
        *("torchrun", "--nproc_per_node=4", "48x", "$HOME", "${1}", "cost$"),
        *("--lr", "0.1"),
    )


def test_they_are_replaced_in_hyperparameters_and_environment_too(tmp_path: Path) -> None:
    """A folder named $SM_CHECKPOINT_DIR was made, and the hint to keep it was refused."""
    folder = "$SM_CHECKPOINT_DIR/hub"
    environment = {"HUB": folder, "PS1": "$ ", "PYTHONPATH": "$SM_MODULE_DIR/src"}
    fields = {"hyperparameters": {"save": folder}, "environment": environment}
    found = command(tmp_path, "python train.py", **fields)
    place = f"{tmp_path}/ml/checkpoints/hub"
    assert found.words[2:] == ("--save", place)
    assert found.variables["PYTHONPATH"].startswith(f"{found.variables['SM_MODULE_DIR']}/src:")
    assert (found.variables["HUB"], found.variables["PS1"]) == (place, "$ ")
    with pytest.raises(UserError, match="uses \\$SM_MODEL, which is not part of the container"):
        command(tmp_path, "python train.py", hyperparameters={"save": "$SM_MODEL"})


def test_the_services_own_variables_stay_behind(tmp_path: Path) -> None:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": "/home/me",
        "AWS_REGION": "eu-west-1",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.2/",
        **dict.fromkeys(("RUN_ID", "OVERRIDES", "INSTANCE_ID", "PYTHONPATH"), "ours"),
        **dict.fromkeys(("NOTIFY_SOCKET", "WATCHDOG_USEC", "TRAINING_LEADER", "RANK"), "ours"),
    }
    found = command(tmp_path, "env", environ, environment={"PYTHONPATH": "lib", "RANK": "0"})
    variables = found.variables
    assert [name for name, value in variables.items() if value == "ours"] == []
    kept = ("HOME", "AWS_REGION", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    assert [variables[name] for name in kept] == [environ[name] for name in kept]
    assert (variables["RANK"], variables["PYTHONUNBUFFERED"]) == ("0", "1")
    # What the program brings is found before ours.
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == "lib"
