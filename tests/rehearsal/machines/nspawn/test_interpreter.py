"""Which files of the host's Python a machine sees."""

import sys
from pathlib import Path

from rehearsal.machines.nspawn.machine import interpreter_files

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def test_a_python_in_usr_local_hides_nothing_of_the_machines_own(tmp_path: Path) -> None:
    environment, base = tmp_path / "venv", tmp_path / "usr/local"
    for folder in (environment / "bin", base / "bin", base / f"lib/{VERSION}"):
        folder.mkdir(parents=True)
    (base / "bin" / VERSION).write_text("the program")
    (base / "bin/python3").symlink_to(VERSION)
    (base / f"lib/lib{VERSION}.so.1.0").write_text("its library")
    (base / "lib/other.so").write_text("not its own")
    (environment / "bin/python3").symlink_to(base / "bin/python3")
    (environment / "bin/python").symlink_to("python3")
    assert interpreter_files(environment, base) == [
        base / "bin/python3",
        base / "bin" / VERSION,
        base / "lib" / VERSION,
        base / f"lib/lib{VERSION}.so.1.0",
    ]
