"""A program to rehearse: a folder with its files and program.json, and the data it trains on.

If no data are passed, make_data.py in that folder or the one above makes them.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from contract.program import WORKLOAD, Program
from rehearsal.demo.action import SNAPSHOT
from rehearsal.demo.children import Child
from rehearsal.demo.deployment import DeployedStacks

# The stages in which it can be interrupted.
PROGRAM_STAGES = (WORKLOAD, SNAPSHOT)
_SPEC = "program.json"
_MAKER = "make_data.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedProgram:
    """A program's folder, its spec, and its data or the script that makes it."""

    folder: Path
    spec: Program
    data: Path

    @classmethod
    def from_folder(cls, folder: Path, data: Path | None) -> "RehearsedProgram":
        """Read a program's folder; raise a ValueError that says what it lacks."""
        folder = folder.resolve()
        path = folder / _SPEC
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {_SPEC}; write it, with at least "
                '{"command": "python train.py"} (docs/your-script.md)'
            )
        spec = Program.from_json(path.read_text(encoding="utf-8"), str(path))
        return cls(folder=folder, spec=spec, data=find_data(folder, data))

    @property
    def dataset(self) -> str:
        """Its folder's name."""
        return self.folder.name

    def make_data(self, stacks: DeployedStacks) -> Child | None:
        """Copy the data, or start making it; do not wait."""
        if self.data.is_file():
            return stacks.start_python("dataset", str(self.data), str(stacks.dataset))
        # A copy, as the user may go on working in the folder.
        shutil.copytree(self.data, stacks.dataset)
        return None

    def context(self) -> dict[str, str]:
        """Return the stack's parameters."""
        return {"program": str(self.folder / _SPEC), "dataset": self.dataset}

    def start_reference(self, stacks: DeployedStacks, folder: Path) -> Child:
        """Start the uninterrupted run in a folder; do not wait."""
        return stacks.start_python(
            "uninterrupted",
            *("-m", "training", "run", "--program-file", str(self.folder / _SPEC)),
            *("--source", str(self.folder), "--dataset-uri", str(stacks.dataset)),
            *("--run-uri", str(folder), "--ml-root", str(folder.with_name("uninterrupted-ml"))),
        )


def find_data(folder: Path, data: Path | None) -> Path:
    """Return the folder of the data that a source folder trains on, or the script that makes it."""
    if data is not None:
        given = data.resolve()
        if not given.is_dir():
            raise ValueError(f"{given} is not a folder; --data takes the folder of your data")
        return given
    for maker in (folder / _MAKER, folder.parent / _MAKER):
        if maker.is_file():
            return maker
    raise ValueError(
        f"no data found for {folder}; pass their folder (--data, with make DATA=), or put a "
        f"{_MAKER} into it"
    )
