"""Programs that boot a machine in namespaces of their own, as a rehearsal does."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.rehearsal.conftest import machines_below, start_python

# Starts one program with what it needs; none outlives its test.
Boot = Callable[..., subprocess.Popen[str]]
HEAD = """
import json, shutil, sys, time
from pathlib import Path
from rehearsal.machines.commands import CommandFailed
from rehearsal.machines.machine import TRAINING
from rehearsal.machines.metadata import MetadataServer, RehearsedInstance
from rehearsal.machines.nspawn.machine import NspawnMachine
from rehearsal.machines.nspawn.namespaces import check_host, enter_namespaces
from rehearsal.machines.nspawn.network import MachineNetwork
from rehearsal.machines.nspawn.root_image import root_image
from rehearsal.machines.quirks import Quirks, Volume

folder, user_data = Path(sys.argv[1]), sys.argv[2].encode()
check_host()
image = root_image(print)
enter_namespaces()

asked, answer = [], b"its AWS"

def application(environ, start):
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    asked.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']} {body[:200]}")
    start("200 OK", [("Content-Length", str(len(answer))), ("ETag", '"0"')])
    return [answer]

def make(quirks=Quirks()):
    return NspawnMachine(
        folder=folder / "machine", image=image, network=network,
        quirks=quirks, metadata=MetadataServer(
            instance=RehearsedInstance(id="i-0123", user_data=user_data)
        ),
    )

def wait_for(text, found):
    give_up_at = time.monotonic() + 300
    while not any(text in each for each in found()):
        assert time.monotonic() < give_up_at, (text, list(found()))
        time.sleep(0.1)

def said(machine, text):
    wait_for(text, machine.log_lines)

with MachineNetwork(folder=folder / "network") as network:
    network.serve_aws(application, "us-east-1")
"""


@pytest.fixture
def boot(tmp_path: Path) -> Iterator[Boot]:
    """Return a function that runs a body with user data in a program of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, user_data: str) -> subprocess.Popen[str]:
        indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
        started.append(start_python("-c", HEAD + indented, str(tmp_path), user_data))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def left_behind(folder: Path) -> list[str]:
    """List loop devices, mounts, control groups and processes of machines below a folder."""
    loops = subprocess.run(["losetup", "--list"], capture_output=True, text=True, check=True).stdout
    mounts = Path("/proc/mounts").read_text()
    text = [line for line in (loops + mounts).splitlines() if str(folder) in line]
    alive = set(_groups_of_processes())
    hierarchies = ("/sys/fs/cgroup", *Path("/sys/fs/cgroup").iterdir())
    groups = [group for each in hierarchies for group in Path(each).glob("rehearsal-*")]
    stale = [str(group) for group in groups if group.name not in alive]
    return [*text, *map(str, machines_below(folder)), *stale]


def _groups_of_processes() -> Iterator[str]:
    """Yield the name that a rehearsal's group has, for every process: others may be running."""
    for each in Path("/proc").glob("[0-9]*/ns/pid"):
        with suppress(OSError):  # it has just ended
            yield f"rehearsal-{each.stat().st_ino}"
