"""What is wrong with one machine, put into its folder before it starts."""

import re
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = "opt/quirks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quirks:
    """Programs and files of a machine's own, its environment, and the packages that it lacks.

    A program is the text of a shell script by name, found before all others; in it, `$real` is the
    program that it hides. A file is a text by its path on the machine. A lacking package is
    invisible to the machine's Python.
    """

    programs: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()

    def furnish(self, root: Path, pytorch: Path, path: str) -> None:
        """Put the environment that stands in for /opt/pytorch, programs and files into a root.

        `path` is where the machine looks for programs but for those of its own.
        """
        if self.lacks:
            lend_environment(pytorch, root / "opt/pytorch", self.lacks)
        else:
            (root / "opt/pytorch").symlink_to(pytorch)
        for name, script in self.programs.items():
            program = root / PROGRAMS / name
            real = shutil.which(name, path=path) or ""
            _write(program, f"#!/bin/sh\nreal='{real}'\n{script}\n")
            program.chmod(0o755)
        for name, text in self.files.items():
            _write(root / name.lstrip("/"), text)

    def path(self, root: Path, path: str) -> str:
        """Return where the machine looks for programs."""
        return f"{root / PROGRAMS}:{path}" if self.programs else path


def lend_environment(source: Path, target: Path, lacking: Collection[str]) -> None:
    """Make an environment that has another's packages, as links, but those it is to lack.

    Programs, the interpreter apart, are those of the source and see all of its packages.
    """
    packages = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
    (target / packages).mkdir(parents=True)
    (target / "bin").mkdir()
    # The interpreter looks for its packages beside the folder that it was started from.
    (target / "pyvenv.cfg").symlink_to(source / "pyvenv.cfg")
    for program in (source / "bin").iterdir():
        (target / "bin" / program.name).symlink_to(program)
    for entry in (source / packages).iterdir():
        if re.split(r"[-.]", entry.name)[0].lower() not in lacking:
            (target / packages / entry.name).symlink_to(entry)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
