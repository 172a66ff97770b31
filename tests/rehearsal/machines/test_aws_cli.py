"""The AWS CLI of a process machine: the real program, which ends with whoever called it."""

import time

import psutil
import pytest

from rehearsal.machines import aws_cli
from rehearsal.machines.commands import CommandFailed
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


def test_a_call_ends_with_its_caller(power: Power) -> None:
    machine = power("true")
    machine.execute("aws", "--version")
    before = len(machine.processes())
    caller = machine.execute("sh", "-c", ENDLESS)
    while len(machine.processes()) < before + 3:
        time.sleep(0.01)
    psutil.Process(int(caller)).kill()
    give_up_at = time.monotonic() + 60
    # Of the three the one that nobody has told to end: the sleep.
    while len(machine.processes()) > before + 1:
        assert time.monotonic() < give_up_at, machine.processes()
        time.sleep(0.02)


def test_a_call_ends_whose_caller_has_ended_before_it_began(power: Power) -> None:
    machine = power("true")
    machine.execute("aws", "--version")
    before = machine.processes()
    (server,) = (each for each in before if aws_cli.__file__ in each.cmdline())
    server.suspend()
    caller = psutil.Process(int(machine.execute("sh", "-c", ENDLESS)))
    while not caller.net_connections("unix"):
        time.sleep(0.01)
    caller.kill()
    server.resume()
    machine.execute("aws", "--version")  # its turn comes after the one that has ended
    give_up_at = time.monotonic() + 10
    while len(machine.processes()) > len(before) + 1:
        assert time.monotonic() < give_up_at, machine.processes()
        time.sleep(0.02)
