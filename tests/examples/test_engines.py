"""The files for other engines, each against its engine's own schema, and against our trainer.

skypilot-0.14.1-task.json is what that package's get_task_schema and get_resources_schema return on
its server; kubernetes-37.0.2-job.json is V1Job's model_json_schema without descriptions, with no
other properties allowed. Neither engine ran.
"""

import json
import shlex
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from cfnlint.jsonschema import StandardValidator

from contract.errors import Exit
from contract.notice import MAX_SECONDS
from training.cli.main import main

FOLDER = Path(__file__).parents[2] / "examples" / "engines"
SCHEMAS = Path(__file__).parent / "schemas"
NAMES = {"skypilot": "skypilot-0.14.1-task", "kubernetes": "kubernetes-37.0.2-job"}


def _mistakes(engine: str, found: Any) -> list[str]:
    schema = json.loads((SCHEMAS / f"{NAMES[engine]}.json").read_text())
    return [each.message for each in StandardValidator(schema).iter_errors(found)]


def _read(engine: str) -> Any:
    return yaml.safe_load((FOLDER / f"{engine}.yaml").read_text())


def _command(engine: str) -> list[str]:
    """The words after `python -m training`."""
    found = _read(engine)
    if engine == "skypilot":
        words = shlex.split(found["run"].replace("\\\n", " "))
        assert words[:4] == ["exec", "python", "-m", "training"]
        return words[4:]
    container = found["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][:3] == ["python", "-m", "training"]
    return [*container["command"][3:], *container["args"]]


@pytest.mark.parametrize("engine", NAMES)
def test_the_file_is_what_its_engine_takes(engine: str) -> None:
    assert _mistakes(engine, _read(engine)) == []


def test_the_schemas_refuse_what_an_engine_would() -> None:
    task, job = _read("skypilot"), _read("kubernetes")
    task["resources"]["job_recovery"]["recover_on_exit_code"] = 75
    assert _mistakes("skypilot", task)
    misspelled = deepcopy(job)
    misspelled["spec"]["template"]["spec"]["terminationGracePeriod"] = 120
    assert _mistakes("kubernetes", misspelled)
    del job["spec"]["podFailurePolicy"]["rules"][0]["action"]
    assert _mistakes("kubernetes", job)


def test_an_interrupted_run_is_started_again_with_time_to_save() -> None:
    assert Exit.INTERRUPTED in _read("skypilot")["resources"]["job_recovery"][
        "recover_on_exit_codes"
    ]  # fmt: skip
    spec = _read("kubernetes")["spec"]
    first, _, mistake = spec["podFailurePolicy"]["rules"]
    assert first["action"] == "Ignore" and first["onExitCodes"]["values"] == [Exit.INTERRUPTED]
    assert mistake["action"] == "FailJob" and mistake["onExitCodes"]["values"] == [2]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == MAX_SECONDS
    # What Kubernetes demands beside a pod failure policy.
    assert pod["restartPolicy"] == "Never"
    assert first["onExitCodes"]["containerName"] == pod["containers"][0]["name"]


@pytest.mark.parametrize("engine", NAMES)
def test_its_command_is_one_that_the_trainer_knows(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # A bucket's name in capitals is nobody's: whatever comes before S3 is asked has been accepted.
    words = [word.replace("s3://", "gs://") for word in _command(engine)]
    assert main(words) == 2
    assert "'gs://" in capsys.readouterr().err
