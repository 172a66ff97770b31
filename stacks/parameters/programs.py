"""Parameters of a program that is not a workload: which go together, and what they describe.

The contract's own checks of them are those of contract/program.py.
"""

from collections.abc import Mapping
from pathlib import Path

from contract.program import WORKLOAD, Program
from stacks.parameters.checks import refuse_unless
from stacks.parameters.context import defaults
from stacks.parameters.fields import ParameterFields

# What only a program has.
_OF_PROGRAMS = (
    *("source", "requirements", "working_folder", "interpreter", "hyperparameter", "env"),
    *("metric", "channels", "notice_signal", "quiet_seconds"),
)
# What only a workload has, and what to do about it.
_OF_WORKLOADS = {
    "recipe": "give hyperparameter.NAME=VALUE",
    "overrides": "give hyperparameter.NAME=VALUE",
    "checkpoint_interval": "a program says itself when it saves",
    "nan_retries": "a program sees itself to losses that diverge",
    "nan_skips": "a program sees itself to losses that diverge",
}


def workload_of_program(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with the workload that runs programs, where one is given."""
    usual = defaults()
    if not values["program"]:
        for name in _OF_PROGRAMS:
            refuse_unless(
                values[name] == usual[name],
                f"{name} is {values[name]!r}, which only a program has; give program=COMMAND too",
            )
        return dict(values)
    for name, advice in _OF_WORKLOADS.items():
        refuse_unless(
            values[name] == usual[name],
            f"{name} is {values[name]!r}, which a program does not have; drop it: {advice}",
        )
    refuse_unless(
        values["workload"] in (usual["workload"], WORKLOAD),
        f"workload is {values['workload']!r} and program {values['program']!r}; give one of them",
    )
    return {**values, "workload": WORKLOAD, "recipe": WORKLOAD}


def program_of(p: ParameterFields) -> Program:
    """Return the program of these parameters; a ValueError for what the contract refuses."""
    return Program(
        command=p.program,
        hyperparameters=dict(p.hyperparameter),
        environment=dict(p.env),
        channels=p.channels,
        working_folder=p.working_folder,
        interpreter=p.interpreter,
        notice_signal=p.notice_signal,
        quiet_seconds=p.quiet_seconds,
        metric_definitions=p.metric,
    )


def check_program(p: ParameterFields) -> None:
    """Refuse a program that the contract refuses, or that has no source folder."""
    if not p.program:
        return
    words = program_of(p).words
    refuse_unless(p.source, f"program is {p.program!r}; give source=FOLDER, which has its files")
    refuse_unless(Path(p.source).is_dir(), f"source is {p.source!r}, which is not a folder")
    folder = Path(p.source, p.working_folder)
    refuse_unless(
        folder.is_dir(),
        f"working_folder is {p.working_folder!r}, but there is no folder {str(folder)!r}",
    )
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    is_script = words[0].startswith("python") and script.endswith(".py")
    refuse_unless(
        not is_script or (folder / script).is_file(),
        f"program is {p.program!r}, but there is no file {script!r} in {str(folder)!r}",
    )
    usual = p.requirements == defaults()["requirements"]
    refuse_unless(
        usual or not p.requirements or Path(p.source, p.requirements).is_file(),
        f"requirements is {p.requirements!r}, which is not a file in {p.source!r}; give a file of "
        "it, or nothing to install nothing",
    )
