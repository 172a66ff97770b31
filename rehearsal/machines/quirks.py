"""The oddities of one machine, put into its folder before it starts."""

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = "opt/quirks"
# The model name that an EBS volume reports.
EBS = "Amazon Elastic Block Store"
PARTITION_TABLE = "partition table"
# The file on a volume with a file system.
KEPT, KEPT_TEXT = "kept.txt", "not to be lost\n"
CONTENTS = ("", "xfs", "ext4", PARTITION_TABLE)
DATA_DEVICE_NAME, DATA_MIB = "sdf", 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """An EBS volume: its device name, its content, and when it appears.

    A file system holds the file kept.txt. `late_seconds` count from power-on.
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
    """A machine's own programs, files, environment and disks, and what its image lacks.

    `programs` are shell scripts by name, found before all others; in them, `$real` is the program
    that they hide. `files` are texts by their path on the machine. The machine's Python does not
    see the packages in `lacks`, and a program of such a name is missing. `disks` are the EBS
    volumes other than the root volume; None means one empty data volume. `memory_mib` limits all
    processes together.
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
        """Refuse quirks that a process machine cannot have."""
        if self.memory_mib is not None or any(each.mib != DATA_MIB for each in self.volumes):
            raise ValueError(
                "process machines cannot limit memory or disk sizes: memory_mib and mib need "
                "machines of kind nspawn"
            )

    def write_programs(self, folder: Path, real: Callable[[str], str]) -> None:
        """Write the programs to a folder; `real` returns the path of the program that one hides."""
        for name, script in self.programs.items():
            _write(folder / name, f"#!/bin/sh\nreal='{real(name)}'\n{script}\n")
            (folder / name).chmod(0o755)

    def write_files(self, root: Path, place: Callable[[str], str]) -> None:
        """Write the files below a root; `place` returns where each belongs."""
        for name, text in self.files.items():
            _write(root / place(name), text)

    def path(self, root: Path, path: str) -> str:
        """Return the machine's PATH."""
        return f"{root / PROGRAMS}:{path}" if self.programs else path


def lend_environment(source: Path, target: Path, lacking: Collection[str]) -> None:
    """Make an environment with links to another's packages, except those that it is to lack.

    Programs other than the interpreter are the source's, and see all of its packages.
    """
    packages = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
    target.mkdir(parents=True)
    # The interpreter looks for packages relative to the path by which it was started.
    (target / "pyvenv.cfg").symlink_to(source / "pyvenv.cfg")
    for folder in (Path("bin"), packages):
        lend_folder(source / folder, target / folder, lacking)


def lend_folder(source: Path, target: Path, lacking: Collection[str]) -> None:
    """Make a folder with links to another's entries, except those that it is to lack."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if re.split(r"[-.]", entry.name)[0].lower() not in lacking:
            (target / entry.name).symlink_to(entry)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
