"""Which hosts can run nspawn machines, and how a rehearsal gets namespaces of its own."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rehearsal.machines.nspawn import namespaces
from rehearsal.machines.nspawn.namespaces import NotPossible, check_host

# On a busy machine the child may have its own /proc before the parent goes on.
LATE_PARENT = """
import os, time
from rehearsal.machines.nspawn.namespaces import enter_namespaces

fork = os.fork

def fork_late():
    child = fork()
    time.sleep(0.5 if child else 0)
    return child

os.fork = fork_late
enter_namespaces()
print(f"process {os.getpid()}", flush=True)
os._exit(7)
"""


@pytest.mark.parametrize(
    ("system", "user", "which", "says"),
    [
        ("Darwin", 0, shutil.which, "nspawn machines need Linux, but this is Darwin"),
        ("Linux", 1000, shutil.which, "nspawn machines need root"),
        ("Linux", 0, lambda _: None, "apt-get install dnsmasq-base iproute2 mmdebstrap openssl"),
    ],
)
def test_fails_in_one_sentence_where_there_can_be_no_machine(
    system: str,
    user: int,
    which: Callable[[str], str | None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", which)
    with pytest.raises(NotPossible, match=says):
        check_host()


def test_fails_in_one_sentence_where_no_control_group_can_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(namespaces, "are_possible", lambda: False)
    with pytest.raises(NotPossible, match=r"need control groups of version 2 with cgroup\.kill"):
        check_host()


@pytest.mark.machine
def test_what_runs_in_the_namespaces_is_process_1_and_its_exit_code_is_the_rehearsals() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE_PARENT],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "process 1\n", "")
