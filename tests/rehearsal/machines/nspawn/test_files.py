"""Where a drill's files are put, so that the machine sees them under their names."""

import pytest

from rehearsal.machines.nspawn.machine import place_of


@pytest.mark.parametrize("root", ["", "/"])
def test_a_device_on_the_bus_is_on_the_bus_of_the_machine(root: str) -> None:
    name = f"{root}sys/bus/pci/devices/0000:00:00.0/class"
    assert place_of(name) == "etc/rehearsal/pci/devices/0000:00:00.0/class"
    assert place_of(f"{root}etc/motd") == "etc/motd"


@pytest.mark.parametrize("name", ["/run/training/notice.json", "sys/class/net", "dev/kmsg"])
def test_fails_a_file_that_the_boot_would_hide(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot start with the file '{name}'"):
        place_of(name)
