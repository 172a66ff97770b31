"""A program in the code bundle: what it is, its source folder and what to install."""

import shutil
from pathlib import Path

from contract.program import PROGRAM_FILE, SOURCE_FOLDER
from contract.source import find_files
from stacks.parameters import StackParameters
from stacks.parameters.checks import refuse_unless
from stacks.parameters.programs import program_of

# Of the bundle, beside the source: what the boot installs.
REQUIREMENTS_FILE = "program/requirements.txt"


def write_program(parameters: StackParameters, bundle: Path) -> None:
    """Write the program, its source and what to install into the bundle's folder."""
    source, program = Path(parameters.source), program_of(parameters)
    paths = find_files(source)
    target = bundle / SOURCE_FOLDER
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, target / path)
    # Where nothing lies in it, git has no folder.
    (target / program.working_folder).mkdir(parents=True, exist_ok=True)
    (bundle / PROGRAM_FILE).write_text(program.to_json(), encoding="utf-8")
    name = Path(program.requirements)
    if not program.requirements or not (source / name).is_file():
        return
    refuse_unless(
        name in paths,
        f"requirements is {program.requirements!r}, which git ignores or which lies outside of "
        f"{parameters.source!r}: no machine would have it; take it out of .gitignore, or write "
        '"" to install nothing',
    )
    # pip finds what it includes next to it.
    text = f"-r {Path(SOURCE_FOLDER).name}/{name.as_posix()}\n"
    (bundle / REQUIREMENTS_FILE).write_text(text, encoding="utf-8")
