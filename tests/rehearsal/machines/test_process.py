"""A machine's life: a clean environment, everything in sight, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from rehearsal.machines.commands import CommandFailed
from rehearsal.machines.process import ProcessMachine
from tests.rehearsal.machines.conftest import Power

REPOSITORY = Path(__file__).parents[3]
# A daemon that leaves its session and its parent, as far away as a process can go.
ESCAPE = """python3 -c '
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("escaped", flush=True)
        time.sleep(600)
    os._exit(0)
'"""
PARENT = """
import sys, time
from pathlib import Path
from rehearsal.machines.process import ProcessMachine
from rehearsal.machines.metadata import MetadataServer, RehearsedInstance
machine = ProcessMachine(
    folder=Path(sys.argv[1]), environment={},
    metadata=MetadataServer(
        instance=RehearsedInstance(id="i-1", user_data=sys.argv[2].encode())
    ),
)
machine.start()
assert machine.wait(60, "escaped")
# Between its first program and the second the user data has no child for a moment.
while len(found := machine.processes()) < 4:
    time.sleep(0.01)
print(*[process.pid for process in found], flush=True)
time.sleep(600)
"""


def wait_for_the_end(pids: Iterable[int]) -> None:
    """Wait until none runs; what only waits for the system's own init to reap it has ended."""
    give_up_at = time.monotonic() + 120
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < give_up_at, left
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_user_data_runs_in_a_clean_environment(power: Power) -> None:
    machine = power("env; echo done with env")
    assert machine.wait(10, "done with env")
    lines = dict(line.split("=", 1) for line in machine.log_lines() if "=" in line)
    assert lines["MACHINE_ROOT"] == str(machine.folder.resolve())
    assert lines["AWS_EC2_METADATA_SERVICE_ENDPOINT"] == machine.metadata.endpoint
    assert lines["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"
    assert "AWS_ACCESS_KEY_ID" not in lines
    assert lines["OMP_WAIT_POLICY"] == "PASSIVE", "machines beside each other share the cores"
    assert lines["PATH"].split(":")[0].endswith("rehearsal/machines/bin")
    assert not Path(lines["AWS_CONFIG_FILE"]).exists()
    temporary = Path(lines["TMPDIR"])
    assert temporary.samefile(machine.folder / "tmp")
    assert len(str(temporary)) < 107 - 66, "Ray's sockets fit below it"
    machine.kill()
    assert not temporary.is_symlink()


def test_kill_ends_even_what_has_left_the_session(power: Power) -> None:
    machine = power(
        f"{ESCAPE}\n(trap '' TERM HUP; echo begun; while :; do sleep 0.05; done) & wait"
    )
    assert machine.wait(10, "escaped") and machine.wait(10, "begun")
    before = {process.pid for process in machine.processes()}
    assert len(before) >= 4
    assert machine.kill() >= 4
    assert machine.processes() == []
    wait_for_the_end(before)
    assert machine.kill() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_machine_does_not_outlive_the_process_that_started_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    user_data = f"#!/bin/bash\n{ESCAPE}\nsleep 600"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "machine"), user_data],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        os.kill(parent.pid, number)
    assert len(pids) >= 4
    wait_for_the_end(pids)


def test_fails_to_start_on_disks_that_are_not_empty(power: Power) -> None:
    machine = power("true")
    machine.kill()
    again = ProcessMachine(
        folder=machine.folder,
        environment={},
        metadata=machine.metadata,
    )
    with pytest.raises(ValueError, match="a new machine has empty disks"):
        again.start()
    with pytest.raises(ValueError, match="was already started"):
        machine.start()


def test_log_lines_only_grow_and_hold_whole_lines(power: Power) -> None:
    machine = power('printf "first\\nsec"; sleep 0.3; echo ond')
    assert machine.wait(10, "first")
    assert machine.log_lines() == ["first"]
    assert machine.wait(10, "second")
    assert machine.log_lines() == ["first", "second"]


def test_execute_runs_a_program_in_the_environment_of_the_machine(power: Power) -> None:
    machine = power("true")
    said = machine.execute("sh", "-c", "echo $MACHINE_ROOT; command -v systemctl; pwd")
    root = str(machine.folder.resolve())
    assert said.splitlines() == [root, f"{REPOSITORY}/rehearsal/machines/bin/systemctl", root]
    with pytest.raises(CommandFailed, match=r"`sh -c echo no >&2; exit 3` .* status 3: no"):
        machine.execute("sh", "-c", "echo no >&2; exit 3")
    with pytest.raises(CommandFailed, match=r"`nothing` .* status 127: .*No such file"):
        machine.execute("nothing")


def test_what_was_executed_ends_with_the_machine(power: Power) -> None:
    machine = power("true")
    started = machine.execute("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!")
    assert runs(int(started))
    with pytest.raises(CommandFailed, match="the machine powered off while it ran"):
        machine.execute("sh", "-c", "sleep 0.2; kill -9 $PPID")
    machine.kill()
    wait_for_the_end([int(started)])


def test_remove_deletes_the_folder(power: Power) -> None:
    machine = power("sleep 600")
    machine.remove()
    assert not machine.folder.exists()
    assert machine.processes() == []
