"""A source folder in the code bundle: of a program, which says what it is, or of a workload."""

from pathlib import Path

from contract.program import PROGRAM_FILE, SOURCE_FOLDER, USUAL_REQUIREMENTS
from contract.source import copy_source
from stacks.parameters import StackParameters
from stacks.parameters.checks import refuse_unless
from stacks.parameters.programs import program_of

# Of the bundle, beside the source: what the boot installs.
REQUIREMENTS_FILE = "program/requirements.txt"


def write_source(parameters: StackParameters, bundle: Path) -> None:
    """Write the source, the program if it is one, and what to install into the bundle's folder."""
    source, target = Path(parameters.source), bundle / SOURCE_FOLDER
    paths = copy_source(source, target)
    requirements = USUAL_REQUIREMENTS
    if parameters.program:
        program = program_of(parameters)
        requirements = program.requirements
        # Where nothing lies in it, git has no folder.
        (target / program.working_folder).mkdir(parents=True, exist_ok=True)
        (bundle / PROGRAM_FILE).write_text(program.to_json(), encoding="utf-8")
    name = Path(requirements)
    if not requirements or not (source / name).is_file():
        return
    refuse_unless(
        name in paths,
        f"requirements is {requirements!r}, which git ignores or which lies outside of "
        f"{parameters.source!r}: no machine would have it; take it out of .gitignore, or, of a "
        'program, write "" to install nothing',
    )
    # pip finds what it includes next to it.
    text = f"-r {Path(SOURCE_FOLDER).name}/{name.as_posix()}\n"
    (bundle / REQUIREMENTS_FILE).write_text(text, encoding="utf-8")
