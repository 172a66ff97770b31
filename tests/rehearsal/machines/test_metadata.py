"""The metadata service as EC2's: version 2 only, tokens that expire, credentials for the CLI."""

import json
import os
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import pytest

from embedded_aws.faults import Fault
from rehearsal.machines.metadata import (
    TOKEN_HEADER,
    TTL_HEADER,
    Credentials,
    MetadataServer,
    RehearsedInstance,
)

NOW = [0.0]


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer(
        instance=RehearsedInstance(
            id="i-1",
            zone="eu-west-1b",
            tags={"RunId": "run-1", "Stack": "TrainingStack"},
            user_data=b"#!/bin/bash\n",
        ),
        credentials=Credentials(access_key_id="ASIAEXAMPLE"),
        clock=lambda: NOW[0],
    ) as running:
        yield running


def ask(
    server: MetadataServer, path: str, headers: Mapping[str, str], method: str = "GET"
) -> tuple[int, str]:
    request = urllib.request.Request(server.endpoint + path, headers=dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def token(server: MetadataServer, ttl: int = 60) -> dict[str, str]:
    status, text = ask(server, "/latest/api/token", {TTL_HEADER: str(ttl)}, "PUT")
    assert status == 200
    return {TOKEN_HEADER: text}


def read(server: MetadataServer, path: str) -> tuple[int, str]:
    return ask(server, path, token(server))


def test_fails_without_a_token(server: MetadataServer) -> None:
    assert ask(server, "/latest/meta-data/instance-id", {})[0] == 401
    assert ask(server, "/latest/meta-data/instance-id", {TOKEN_HEADER: "made up"})[0] == 401


def test_says_nothing_of_a_client_that_hangs_up(
    server: MetadataServer, capsys: pytest.CaptureFixture[str]
) -> None:
    host, port = server.endpoint.removeprefix("http://").split(":")
    for _ in range(5):
        client = socket.create_connection((host, int(port)))
        # Closed with a reset, not in order: what a client that is killed leaves.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(b"GET /latest/meta-data/instance-id HTTP/1.1\r\n\r\n")
        client.close()
    assert ask(server, "/latest/meta-data/instance-id", token(server)) == (200, "i-1")
    while any("process_request_thread" in each.name for each in threading.enumerate()):
        time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_fails_with_a_token_whose_time_is_over(server: MetadataServer) -> None:
    headers = token(server, ttl=10)
    assert ask(server, "/latest/meta-data/instance-id", headers) == (200, "i-1")
    NOW[0] += 11
    assert ask(server, "/latest/meta-data/instance-id", headers)[0] == 401


@pytest.mark.parametrize("ttl", ["", "0", "21601", "an hour"])
def test_fails_to_issue_a_token_without_a_possible_life(server: MetadataServer, ttl: str) -> None:
    assert ask(server, "/latest/api/token", {TTL_HEADER: ttl}, "PUT")[0] == 400


def test_fails_to_issue_a_token_through_a_proxy(server: MetadataServer) -> None:
    headers = {TTL_HEADER: "60", "X-Forwarded-For": "10.0.0.1"}
    assert ask(server, "/latest/api/token", headers, "PUT")[0] == 403


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/latest/meta-data/instance-type", "g5.xlarge"),
        ("/2021-03-23/meta-data/instance-id", "i-1"),
        ("/latest/meta-data/placement/region", "eu-west-1"),
        ("/latest/meta-data/instance-life-cycle", "spot"),
        ("/latest/meta-data/tags/instance/RunId", "run-1"),
        ("/latest/meta-data/tags/instance/", "RunId\nStack"),
        ("/latest/meta-data/iam/", "info\nsecurity-credentials/"),
        ("/latest/meta-data/iam/security-credentials/", "TrainingInstanceRole"),
        ("/2021-03-23/user-data", "#!/bin/bash\n"),
    ],
)
def test_answers_what_is_there(server: MetadataServer, path: str, content: str) -> None:
    assert read(server, path) == (200, content)


@pytest.mark.parametrize(
    "path", ["/", "/latest/nothing", "/oldest/meta-data/instance-id", "/latest/meta-data/inst"]
)
def test_what_does_not_exist_is_404(server: MetadataServer, path: str) -> None:
    assert read(server, path)[0] == 404


def test_notice_and_recommendation_are_404_until_they_are_made(server: MetadataServer) -> None:
    action = "/latest/meta-data/spot/instance-action"
    rebalance = "/latest/meta-data/events/recommendations/rebalance"
    assert (read(server, action)[0], read(server, rebalance)[0]) == (404, 404)
    server.rebalance()
    assert read(server, action)[0] == 404
    assert "noticeTime" in json.loads(read(server, rebalance)[1])
    when = server.notice(120)
    announced = json.loads(read(server, action)[1])
    assert announced == {"action": "terminate", "time": f"{when:%Y-%m-%dT%H:%M:%SZ}"}


def test_identity_document_names_the_instance(server: MetadataServer) -> None:
    document = json.loads(read(server, "/latest/dynamic/instance-identity/document")[1])
    assert (document["instanceId"], document["region"]) == ("i-1", "eu-west-1")


def test_the_real_aws_cli_takes_its_credentials_from_here(server: MetadataServer) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": server.endpoint,
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }
    done = subprocess.run(
        ["aws", "configure", "list"], env=environment, capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if "access_key" in line]
    assert "MPLE" in line
    assert "iam-role" in line


def test_a_fault_answers_in_its_place_or_lets_nobody_have_an_answer(
    server: MetadataServer,
) -> None:
    headers = token(server)
    path = "/latest/meta-data/instance-id"
    server.faults.begin([Fault(action="metadata:Get", key="meta-data/*", status=503)])
    assert ask(server, path, headers)[0] == 503
    server.faults.begin([Fault(action="metadata:*", loses_answer=True)])
    for method in ("GET", "PUT"):
        with pytest.raises(ConnectionError):
            ask(server, path, headers, method)
    server.faults.begin([Fault(action="metadata:Put", key="api/token", status=500)])
    assert ask(server, path, headers) == (200, "i-1")
    assert ask(server, "/latest/api/token", {TTL_HEADER: "60"}, "PUT")[0] == 500


def test_its_times_are_those_of_aws_clock(server: MetadataServer) -> None:
    server.faults.clock_ahead_seconds = 3600
    ahead = server.notice(60) - datetime.now(UTC)
    assert 3650 < ahead.total_seconds() < 3661


def test_closing_twice_changes_nothing(server: MetadataServer) -> None:
    server.close()
    server.close()
    with pytest.raises(ValueError, match="call start"):
        _ = server.endpoint
