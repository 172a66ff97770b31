"""The source folder in the code bundle: a workload's, or a program's with its description."""

import json
import shlex
from pathlib import Path

from contract.program import EMPTY_FOLDERS, PROGRAM_FILE, SOURCE_FOLDER, USUAL_REQUIREMENTS
from contract.source import copy_source, empty_folders
from stacks.parameters import StackParameters
from stacks.parameters.checks import refuse_unless
from stacks.parameters.programs import program_of

# In the bundle, next to the source: what the boot installs.
REQUIREMENTS_FILE = "program/requirements.txt"


def write_source(parameters: StackParameters, bundle: Path) -> None:
    """Write the source, the program if it is one, and what to install into the bundle's folder."""
    source, target = Path(parameters.source), bundle / SOURCE_FOLDER
    paths = copy_source(source, target)
    requirements = USUAL_REQUIREMENTS
    if parameters.program:
        program = program_of(parameters)
        requirements = program.requirements
        # Neither git nor an asset's archive keeps an empty folder.
        folders = {Path(program.working_folder), *empty_folders(source, paths)}
        names = sorted(folder.as_posix() for folder in folders)
        (bundle / EMPTY_FOLDERS).write_text(json.dumps(names), encoding="utf-8")
        (bundle / PROGRAM_FILE).write_text(program.to_json(), encoding="utf-8")
    name = Path(requirements)
    if not requirements or not (source / name).is_file():
        return
    refuse_unless(
        name in paths,
        f"requirements is {requirements!r}, which git ignores or which lies outside of "
        f"{parameters.source!r}: no machine would have it; take it out of .gitignore or, for a "
        'program, write "" to install nothing',
    )
    # pip resolves its includes relative to the file.
    text = f"-r {shlex.quote(f'{Path(SOURCE_FOLDER).name}/{name.as_posix()}')}\n"
    (bundle / REQUIREMENTS_FILE).write_text(text, encoding="utf-8")
