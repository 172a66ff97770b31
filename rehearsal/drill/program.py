"""A program to rehearse: a folder with its files and program.json, and the data it trains on.

Without data of one's own, make_data.py in that folder or the one above makes it.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract.program import Program
from rehearsal.drill.children import Child
from rehearsal.drill.deployment import DeployedStacks

_SPEC = "program.json"
_MAKER = "make_data.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedProgram:
    """A program's folder, its spec, and what makes its data."""

    folder: Path
    spec: Program
    make_data: Callable[[DeployedStacks], Child | None]

    @classmethod
    def from_folder(cls, folder: Path, data: Path | None) -> "RehearsedProgram":
        """Read a program's folder; a ValueError says what it lacks."""
        folder = folder.resolve()
        path = folder / _SPEC
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {_SPEC}; write it, with at least "
                '{"command": "python train.py"} (docs/your-script.md)'
            )
        spec = Program.from_json(path.read_text(encoding="utf-8"), str(path))
        return cls(folder=folder, spec=spec, make_data=_data_of(folder, data))

    @property
    def name(self) -> str:
        """Its folder's name, which is its dataset's, too."""
        return self.folder.name

    def context(self) -> dict[str, str]:
        """The stack's parameters."""
        return {"program": str(self.folder / _SPEC), "dataset": self.name}

    def start_reference(self, stacks: DeployedStacks, folder: Path) -> Child:
        """Start the run that nobody interrupts, in a folder; do not wait."""
        return stacks.start_python(
            "uninterrupted",
            *("-m", "training", "run", "--program-file", str(self.folder / _SPEC)),
            *("--source", str(self.folder), "--dataset-uri", str(stacks.dataset)),
            *("--run-uri", str(folder), "--ml-root", str(folder.with_name("uninterrupted-ml"))),
            relayed=lambda line: False,
        )


def _data_of(folder: Path, data: Path | None) -> Callable[[DeployedStacks], Child | None]:
    if data is not None:
        given = data.resolve()
        if not given.is_dir():
            raise ValueError(f"{given} is not a folder; --data takes the program's data")

        def copy(stacks: DeployedStacks) -> None:
            # The upload writes a manifest, which the user's folder need not have.
            shutil.copytree(given, stacks.dataset)

        return copy
    for maker in (folder / _MAKER, folder.parent / _MAKER):
        if maker.is_file():
            return lambda stacks: stacks.start_python("dataset", str(maker), str(stacks.dataset))
    raise ValueError(
        f"no data found for {folder}; name its folder (--data, with make DATA=), or put a "
        f"{_MAKER} next to the program"
    )
