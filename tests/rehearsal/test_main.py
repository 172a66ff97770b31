"""The rehearsal's command line: what it refuses, and that it leaves this process as it was."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.cleared_folder import cleared_folder
from embedded_aws import EmbeddedAws
from rehearsal import rehearsal_command as commands
from rehearsal.demo import deployment
from rehearsal.demo.fleet import RehearsalFailed
from rehearsal.rehearsal_command import STOP_SIGNALS, main, parse_arguments


def handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in STOP_SIGNALS}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_command_and_the_next_one_is_the_callers(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impatient(*_: object) -> int:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
        raise AssertionError("the first signal raises")

    own = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as without nohup
    try:
        before = handlers()
        monkeypatch.setattr(commands, "show_alarms", impatient)
        monkeypatch.setattr(sys, "argv", ["rehearsal", "alarms"])
        assert main() == 130
        assert "has been stopped" in capsys.readouterr().err
        assert handlers() == before, "a later SIGTERM would be swallowed"
    finally:
        signal.signal(signal.SIGHUP, own)


def test_what_is_started_with_nohup_goes_on_when_the_terminal_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(*_: object) -> int:
        signal.raise_signal(signal.SIGHUP)
        return 0

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(commands, "show_alarms", closed)
        monkeypatch.setattr(sys, "argv", ["rehearsal", "alarms"])
        assert main() == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_ctrl_c_while_it_is_imported_is_one_line() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "rehearsal", "demo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.rstrip().endswith(" rich.console"))
        process.send_signal(signal.SIGINT)
        said = [line for line in process.stderr if not line.startswith("import time:")]
    assert (process.returncode, said) == (130, ["interrupted before it started\n"])


def test_fails_when_the_port_is_in_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = handlers()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["rehearsal", "aws", "--port", str(port)])
        assert main() == 2
    assert f"port {port} is in use by another program; choose another with --port, or" in (
        capsys.readouterr().err
    )
    assert handlers() == before


def test_fails_an_interruption_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["demo", "--interrupt", "head:1"])
    assert "kill:STAGE:N or notice:STAGE:N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--notice-seconds=0", "0 is not a positive number"),
        ("--notice-seconds=nan", "nan is not a positive number"),
        ("--count=0", "0 is not positive"),
    ],
)
def test_fails_for_a_zero_which_is_no_default(
    option: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["demo", option])
    assert f"argument {option.partition('=')[0]}: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["demo", "--workload=trajectory", "--interrupt=kill:haed:3"],
            "the interruption kill:haed:3 is in stage 'haed', which does not exist; known are",
        ),
        (
            ["demo", "--program=examples/plain", "--interrupt=kill:haed:3"],
            "known are program, snapshot",
        ),
        (["demo", "--size=nosuch"], "size 'nosuch' is not in the instance catalogue"),
        (["demo", "--size=t3.micro", "--program=examples/plain"], "--size is t3.micro, on which"),
        (
            ["demo", "--recipe=nosuch"],
            "has no recipe 'nosuch'; known are demo, full, laptop, magvit_b",
        ),
        (["demo", "--overrides=widht=3"], "has no field 'widht'; did you mean 'width'?"),
        (["demo", "--workload=shapes:SHAPES"], "pass both for a workload of your own"),
        (["demo", "--data=mine"], "--data is mine, but trajectory rehearses on data that it makes"),
        (["demo", "--source=examples"], "pass both for a workload of your own"),
        (["demo", "--workload=suns:SUNS", "--source=examples"], "module 'suns' was not found"),
        (["demo", "--hosts=2", "--program=examples/plain"], "leave out --program and --machine"),
        (["demo", "--hosts=4", "--size=g5.12xlarge"], "--hosts is 4 and g5.12xlarge has 4 GPUs"),
        (["demo", "--hosts=8", "--workload=detection"], "4 samples a step, too few for 8 GPUs"),
        (["aws", "--port=65536"], "the port is 65536; use 1 to 65535, or 0 for a free one"),
        (["many", "--runs=0", "--at-once=2"], "--runs is 0 and --at-once 2; use 1 or more of each"),
    ],
)
def test_fails_before_anything_is_deployed(
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(deployment, "EmbeddedAws", None)
    monkeypatch.setattr(sys, "argv", ["rehearsal", *arguments])
    assert main() == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert sentence in said


def test_no_setting_of_the_person_for_aws_cdk_or_ranks_reaches_the_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CDK_PROFILE ended the bootstrap, WORLD_SIZE the uninterrupted run."""
    names = ("AWS_PROFILE", "CDK_PROFILE", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    for name in names:
        monkeypatch.setitem(os.environ, name, "8")
    with EmbeddedAws() as aws:
        environment = deployment.child_environment(aws)
    assert not environment.keys() & {*names}
    assert environment["AWS_ACCESS_KEY_ID"]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE", "runs beside each other share the cores"


def test_what_s3_keeps_of_large_objects_is_in_the_folder_of_the_rehearsal(tmp_path: Path) -> None:
    before = tempfile.gettempdir()
    with deployment.embedded_stacks(tmp_path / "out", is_nspawn=False, say=print):
        assert tempfile.gettempdir() == str(tmp_path / "out")
    assert tempfile.gettempdir() == before


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("typed"), 2), (RehearsalFailed("stuck"), 1), (OSError(), 1)]
)
def test_what_was_typed_wrong_is_told_from_what_failed(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(commands, "show_alarms", fail)
    monkeypatch.setattr(sys, "argv", ["rehearsal", "alarms"])
    assert main() == status


def test_fails_to_start_a_second_embedded_aws_for_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["rehearsal", "aws", "--port", "0"])
    with cleared_folder(tmp_path / "out/aws-local/now"):
        assert main() == 2
    assert "another command is writing to" in capsys.readouterr().err
    assert not (tmp_path / "out/aws-local.env").exists()


def test_stacks_without_machines_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed, said = ["First"], list[str]()

    def describe_stacks() -> dict[str, Any]:
        output = {"OutputKey": "FleetIdOutput", "OutputValue": "sfr-1"}
        return {"Stacks": [{"StackName": name, "Outputs": [output]} for name in deployed]}

    class OneFleet:
        def __init__(self, **given: Any) -> None:
            self.id, self.close = given["id"], lambda: None

        def follow(self, is_gone: Callable[[], bool], **_: Any) -> None:
            deployed.append("Second")
            assert (is_gone(), is_gone(), self.id) == (False, False, "sfr-1")
            deployed.remove("First")
            assert is_gone()

    client = SimpleNamespace(describe_stacks=describe_stacks)
    aws = SimpleNamespace(client=lambda _: client, capacity=SimpleNamespace())
    monkeypatch.setattr(commands, "Fleet", OneFleet)
    monkeypatch.setattr(commands, "EventBus", lambda **_: SimpleNamespace(close=lambda: None))
    commands._boot_machines(SimpleNamespace(aws=aws, folder=tmp_path), said.append)  # type: ignore[arg-type]
    assert said[0].startswith("First has the fleet sfr-1")
    assert said[1:] == ["no machine boots for Second before First is destroyed"]
