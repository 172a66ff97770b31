"""The AWS CLI of a process machine: the real program, which ends with whoever called it."""

import time
from collections.abc import Callable

import psutil
import pytest

from rehearsal.machines import aws_cli
from rehearsal.machines.commands import CommandFailed
from rehearsal.machines.process import ProcessMachine
from tests.rehearsal.machines.conftest import Power


def test_it_is_the_real_one_with_its_caller_s_environment_streams_and_status(power: Power) -> None:
    machine = power("true")
    assert machine.execute("aws", "--version").startswith("aws-cli/1.")
    said = machine.execute(
        "sh", "-c", "cd tmp; AWS_DEFAULT_OUTPUT=mine aws configure get output || echo status $?; "
        "echo '[default]\noutput = text' >mine; AWS_CONFIG_FILE=mine aws configure get output"
    )  # fmt: skip
    assert said.splitlines() == ["status 1", "text"]
    with pytest.raises(CommandFailed, match=r"(?s)status 2: .*Invalid choice"):
        machine.execute("aws", "no-such-service")


# Its standard input does not end by itself.
ENDLESS = "sleep 600 2>/dev/null | aws s3 cp - s3://bucket/key >/dev/null 2>&1 & echo $!"


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def forking_server(machine: ProcessMachine) -> psutil.Process:
    """The process that forks for each call, once the fork of the first call has ended."""
    machine.execute("aws", "--version")  # answered just before its fork ends
    found: list[psutil.Process] = []

    def is_alone() -> bool:
        found[:] = [each for each in machine.processes() if aws_cli.__file__ in _command(each)]
        return len(found) == 1

    wait_until(is_alone)
    return found[0]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended since it was listed
        return []


def test_a_call_ends_with_its_caller(power: Power) -> None:
    machine = power("true")
    forking_server(machine)
    before = len(machine.processes())
    caller = machine.execute("sh", "-c", ENDLESS)
    wait_until(lambda: len(machine.processes()) >= before + 3)
    psutil.Process(int(caller)).kill()
    # Of the three the one that nobody has told to end: the sleep.
    wait_until(lambda: len(machine.processes()) <= before + 1)


def test_a_call_ends_whose_caller_has_ended_before_it_began(power: Power) -> None:
    machine = power("true")
    server = forking_server(machine)
    before = machine.processes()
    server.suspend()
    caller = psutil.Process(int(machine.execute("sh", "-c", ENDLESS)))
    wait_until(lambda: bool(caller.net_connections("unix")))
    caller.kill()
    server.resume()
    machine.execute("aws", "--version")  # its turn comes after the one that has ended
    wait_until(lambda: len(machine.processes()) <= len(before) + 1)
