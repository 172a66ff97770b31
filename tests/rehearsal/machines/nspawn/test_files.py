"""Which files a machine sees: those of a drill under their names, of the host its Python."""

import sys
from pathlib import Path

import pytest

from rehearsal.machines.nspawn.machine import interpreter_files, place_of

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize("root", ["", "/"])
def test_a_device_on_the_bus_is_on_the_bus_of_the_machine(root: str) -> None:
    name = f"{root}sys/bus/pci/devices/0000:00:00.0/class"
    assert place_of(name) == "etc/rehearsal/pci/devices/0000:00:00.0/class"
    assert place_of(f"{root}etc/motd") == "etc/motd"


@pytest.mark.parametrize("name", ["/run/training/notice.json", "sys/class/net", "dev/kmsg"])
def test_fails_a_file_that_the_boot_would_hide(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot start with the file '{name}'"):
        place_of(name)


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
