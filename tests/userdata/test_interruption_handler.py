"""The handler against a metadata service, with a systemctl that writes down how it is called."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rehearsal.machines.metadata import MetadataServer, RehearsedInstance
from tests.userdata.rig import REPOSITORY, install
from userdata.interruption_handler import InterruptionHandler
from userdata.metadata import InstanceMetadata, MetadataError


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[MetadataServer]:
    with MetadataServer(instance=RehearsedInstance(id="i-1"), clock=clock) as running:
        yield running


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "bin/systemctl", f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("MACHINE_ROOT", str(tmp_path))
    monkeypatch.setenv("INSTANCE_ID", "i-1")
    return tmp_path


def calls(root: Path) -> list[str]:
    path = root / "calls"
    return path.read_text().splitlines() if path.exists() else []


def events(root: Path) -> list[str]:
    spool = root / "var/lib/training/events"
    return [json.loads(path.read_text())["name"] for path in sorted(spool.glob("*.json"))]


def handler_of(server: MetadataServer, clock: Clock) -> InterruptionHandler:
    return InterruptionHandler(metadata=InstanceMetadata(endpoint=server.endpoint, clock=clock))


def test_nothing_is_told_while_there_is_nothing(
    server: MetadataServer, clock: Clock, root: Path
) -> None:
    assert not handler_of(server, clock).poll()
    assert (calls(root), events(root)) == ([], [])


def test_a_notice_is_told_once_even_by_a_restarted_handler(
    server: MetadataServer, clock: Clock, root: Path
) -> None:
    server.notice(120)
    assert handler_of(server, clock).poll()
    assert handler_of(server, clock).poll()
    assert calls(root) == ["kill --kill-whom=main --signal=SIGUSR1 training.service"]
    assert events(root) == ["notice"]
    notice = json.loads((root / "run/training/notice.json").read_text())
    assert notice["action"] == "terminate"


def test_a_notice_is_signaled_where_nothing_can_be_written_to_the_root_volume(
    server: MetadataServer, root: Path
) -> None:
    (root / "var").write_text("no folder can be made here")
    server.notice(120)
    with Path("/dev/full").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "userdata.interruption_handler"],
            cwd=REPOSITORY,
            env={**os.environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT": server.endpoint},
            stdout=log,
            check=True,
        )
    assert calls(root) == ["kill --kill-whom=main --signal=SIGUSR1 training.service"]


def test_a_recommendation_that_comes_with_the_notice_is_not_told(
    server: MetadataServer, clock: Clock, root: Path
) -> None:
    server.rebalance()
    server.notice(120)
    assert handler_of(server, clock).poll()
    assert [line for line in calls(root) if "SIGUSR2" in line] == []


def test_the_notice_after_our_own_stop_is_not_told(
    server: MetadataServer, clock: Clock, root: Path
) -> None:
    (root / "run/training").mkdir(parents=True)
    (root / "run/training/stopping").touch()
    server.notice(120)
    assert handler_of(server, clock).poll()
    assert (calls(root), events(root)) == ([], ["notice-after-stop"])


def test_an_expired_token_is_renewed(server: MetadataServer, clock: Clock, root: Path) -> None:
    handler = handler_of(server, clock)
    assert handler.metadata.read("meta-data/instance-id") == "i-1"
    clock.now += 30_000
    assert handler.metadata.read("meta-data/instance-id") == "i-1"


def test_a_token_that_the_service_forgot_is_renewed(server: MetadataServer, clock: Clock) -> None:
    metadata = InstanceMetadata(endpoint=server.endpoint, clock=clock)
    assert metadata.read("meta-data/instance-id") == "i-1"
    server._tokens.clear()
    assert metadata.read("meta-data/instance-id") == "i-1"


def test_a_service_that_does_not_answer_is_asked_again(
    server: MetadataServer, clock: Clock, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = handler_of(server, clock)
    server.notice(120)
    endpoint, handler.metadata.endpoint = handler.metadata.endpoint, "http://127.0.0.1:1"
    assert not handler.poll()
    assert not handler.poll()
    handler.metadata.endpoint = endpoint
    assert handler.poll()
    lines = capfd.readouterr().out.splitlines()
    assert len([line for line in lines if "trouble, retrying" in line]) == 1
    assert any("the metadata service responds again" in line for line in lines)


def test_a_notice_that_cannot_be_read_is_asked_for_again(
    server: MetadataServer, clock: Clock, root: Path
) -> None:
    server._announced["meta-data/spot/instance-action"] = "not json"
    handler = handler_of(server, clock)
    assert not handler.poll()
    server.notice(120)
    assert handler.poll()


def test_fails_to_read_where_nothing_listens() -> None:
    with pytest.raises(MetadataError, match=r"PUT http://127.0.0.1:1/latest/api/token"):
        InstanceMetadata(endpoint="http://127.0.0.1:1").read("meta-data/instance-id")
