"""Nothing of a QEMU machine is left, however its rehearsal dies."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.userdata.rig import REPOSITORY

PROGRAM = """
import sys, time
from pathlib import Path
from rehearsal.machines.metadata import MetadataServer, RehearsedInstance
from rehearsal.machines.nspawn.namespaces import enter_namespaces
from rehearsal.machines.nspawn.network import MachineNetwork
from rehearsal.machines.nspawn.root_image import root_image
from tests.rehearsal.machines.qemu.disk_image import disk_image
from tests.rehearsal.machines.qemu.host import check_host
from tests.rehearsal.machines.qemu.machine import QemuMachine

folder = Path(sys.argv[1])
check_host()
image = disk_image(root_image(lambda said: None), lambda said: None)
enter_namespaces()
with MachineNetwork(folder=folder / "network") as network:
    network.serve_aws(lambda environ, start: [], "us-east-1")
    machine = QemuMachine(
        folder=folder / "machine", image=image, network=network,
        metadata=MetadataServer(instance=RehearsedInstance(id="i-0123")),
    )
    machine.start()
    print("on", flush=True)
    time.sleep(3600)
"""


def processes(folder: Path) -> list[str]:
    """The commands that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if str(folder) in words:
            found.append(words)
    return found


@pytest.mark.machine
@pytest.mark.slow  # the root disk takes a minute, the first time
def test_a_rehearsal_that_is_killed_leaves_no_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "on\n"
        assert any("qemu-system" in words for words in processes(tmp_path))
        program.kill()
    give_up_at = time.monotonic() + 30
    while found := processes(tmp_path):
        assert time.monotonic() < give_up_at, found
        time.sleep(0.1)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
