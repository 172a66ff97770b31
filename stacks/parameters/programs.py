"""A program that is not a workload: its program.json, and parameters that do not apply to it.

program.json alone says what differs from the defaults of contract/program.py, which checks it.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from contract.program import PROGRAM_FILE, USUAL_REQUIREMENTS, WORKLOAD, Program
from contract.trainer_options import OPTIONS
from stacks.parameters.checks import refuse_unless
from stacks.parameters.context import defaults
from stacks.parameters.fields import ParameterFields
from stacks.parameters.workloads import is_own

# What only a workload has, and what to do about it.
_OF_WORKLOADS = {
    **dict.fromkeys(("recipe", "overrides"), "write hyperparameters into program.json"),
    **{
        f"train.{option.name}": option.why_not_for_programs
        for option in OPTIONS.values()
        if option.why_not_for_programs
    },
}


def workload_of_program(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values, with the workload that runs programs if a program is given."""
    usual = defaults()
    program, source = str(values["program"]).strip(), str(values["source"])
    if not program:
        refuse_unless(
            not source or is_own(str(values["workload"])),
            f"source is {source!r}, which is for a program or a workload of your own; add "
            "program=COMMAND or workload=package.module:NAME",
        )
        return dict(values)
    for name, advice in _OF_WORKLOADS.items():
        refuse_unless(
            values.get(name) == usual.get(name),
            f"{name} is {values.get(name)!r}, which a program does not have; drop it: {advice}",
        )
    refuse_unless(
        values["workload"] in (usual["workload"], WORKLOAD),
        f"workload is {values['workload']!r} and program {program!r}; use one of them",
    )
    if _is_file(program) and not source:
        source = str(Path(program).parent)
    return {**values, "source": source, "workload": WORKLOAD, "recipe": WORKLOAD}


def _is_file(program: str) -> bool:
    return program.endswith(".json") and len(program.split()) == 1


def program_of(p: ParameterFields) -> Program:
    """Return the program: the file that `program` names, or its command and source/program.json.

    A ValueError says what the contract refuses.
    """
    is_file = _is_file(p.program)
    path = Path(p.program) if is_file else Path(p.source, Path(PROGRAM_FILE).name)
    if not is_file and not path.is_file():
        return Program(command=p.program)
    try:
        spec = Program.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"program is {p.program!r}, which cannot be read ({error})") from error
    return spec if is_file else replace(spec, command=p.program)


def check_program(p: ParameterFields) -> None:
    """Refuse a program that the contract refuses, or that has no source folder."""
    if not p.program:
        return
    refuse_unless(p.source, f"program is {p.program!r}; add source=FOLDER, the folder of its files")
    program = program_of(p)
    folder = Path(p.source, program.working_folder)
    refuse_unless(
        folder.is_dir(),
        f"working_folder is {program.working_folder!r}, but {str(folder)!r} does not exist",
    )
    words = program.words
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    is_script = words[0].startswith("python") and script.endswith(".py")
    refuse_unless(
        not is_script or (folder / script).is_file(),
        f"program is {program.command!r}, but {str(folder)!r} has no file {script!r}",
    )
    refuse_unless(
        not program.init_from or program.init_from.startswith("s3://"),
        f"init_from is {program.init_from!r}, where no machine has it; name the run as "
        "s3://RUN-BUCKET/runs/ID",
    )
    requirements = program.requirements
    refuse_unless(
        requirements in ("", USUAL_REQUIREMENTS) or Path(p.source, requirements).is_file(),
        f"requirements is {requirements!r}, which is not a file in {p.source!r}; name a file "
        'in it, or write "" to install nothing',
    )
