"""What is unusual about one machine, put into its folder before it starts."""

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = "opt/quirks"
# The model that an EBS volume names itself by.
EBS = "Amazon Elastic Block Store"
PARTITION_TABLE = "partition table"
# What is on a volume with a file system.
KEPT, KEPT_TEXT = "kept.txt", "not to be lost\n"
CONTENTS = ("", "xfs", "ext4", PARTITION_TABLE)
DATA_DEVICE_NAME, DATA_MIB = "sdf", 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """An EBS volume: its device name, its content, and when it appears.

    A file system holds the file kept.txt. `late_seconds` are from power-on.
    """

    device_name: str = DATA_DEVICE_NAME
    content: str = ""
    late_seconds: float = 0.0
    mib: int = DATA_MIB

    def __post_init__(self) -> None:
        if self.content not in CONTENTS:
            known = ", ".join(repr(name) for name in CONTENTS)
            raise ValueError(f"content is {self.content!r}; use one of: {known}")


DATA_VOLUME = Volume()


@dataclass(frozen=True, kw_only=True, slots=True)
class Quirks:
    """A machine's own programs, files, environment and disks, and the packages that it lacks.

    A program is the text of a shell script by name, found before all others; in it, `$real` is the
    program that it hides. A file is a text by its path on the machine. A lacking package is
    invisible to the machine's Python. `disks` are the EBS volumes other than the root volume; None
    means one empty data volume. `memory_mib` limits all processes together.
    """

    programs: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    disks: tuple[Volume, ...] | None = None
    memory_mib: int | None = None

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """The EBS volumes other than the root volume."""
        return (DATA_VOLUME,) if self.disks is None else self.disks

    def check_for_process_machine(self) -> None:
        """Refuse what a process machine cannot have."""
        if self.memory_mib is not None or any(each.mib != DATA_MIB for each in self.volumes):
            raise ValueError(
                "process machines cannot limit memory or disk sizes: memory_mib and mib need "
                "machines of kind nspawn"
            )

    def write_programs(self, folder: Path, real: Callable[[str], str]) -> None:
        """Write the programs to a folder; `real` finds the machine's own path of a hidden one."""
        for name, script in self.programs.items():
            _write(folder / name, f"#!/bin/sh\nreal='{real(name)}'\n{script}\n")
            (folder / name).chmod(0o755)

    def write_files(self, root: Path, place: Callable[[str], str]) -> None:
        """Write the files to a root; `place` is where each lies there."""
        for name, text in self.files.items():
            _write(root / place(name), text)

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
    # The interpreter looks for its packages next to the folder that it was started from.
    (target / "pyvenv.cfg").symlink_to(source / "pyvenv.cfg")
    for program in (source / "bin").iterdir():
        (target / "bin" / program.name).symlink_to(program)
    for entry in (source / packages).iterdir():
        if re.split(r"[-.]", entry.name)[0].lower() not in lacking:
            (target / packages / entry.name).symlink_to(entry)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
