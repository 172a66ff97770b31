"""What a machine's network card is called, and how AWS answers to a machine."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import BaseWSGIServer, make_server

from rehearsal.machines.nspawn import network
from rehearsal.machines.nspawn.network import BucketInPath, Card, MachineNetwork


def test_cards_have_addresses_of_their_own_that_the_metadata_repeats() -> None:
    cards = [Card(number=number) for number in range(1, 251)]
    assert len({card.mac for card in cards}) == len({card.address for card in cards}) == 250
    about = cards[16].metadata()
    assert about["mac"] == "0e:00:00:00:00:11"
    assert about["network/interfaces/macs/0e:00:00:00:00:11/local-ipv4s"] == "10.77.1.17"


@pytest.mark.parametrize(
    ("host", "path"),
    [
        ("bucket.s3.us-east-1.amazonaws.com", "/bucket/key"),
        ("my.bucket.s3.amazonaws.com", "/my.bucket/key"),
        ("s3.us-east-1.amazonaws.com", "/key"),
        ("ec2.us-east-1.amazonaws.com", "/key"),
    ],
)
def test_a_bucket_moves_from_the_host_into_the_path(host: str, path: str) -> None:
    seen: dict[str, Any] = {}

    def application(environ: dict[str, Any], _: Any) -> list[bytes]:
        seen.update(environ)
        return []

    BucketInPath(application)({"HTTP_HOST": host, "PATH_INFO": "/key"}, None)
    assert seen["PATH_INFO"] == path


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MachineNetwork, int]]:
    """Be AWS on a free port."""
    servers: list[BaseWSGIServer] = []

    def make(_: str, __: int, *arguments: Any, **options: Any) -> BaseWSGIServer:
        servers.append(make_server("127.0.0.1", 0, *arguments, **options))
        return servers[0]

    def application(_: Any, start: Any) -> list[bytes]:
        start("200 OK", [("Content-Length", "7")])
        return [b"its AWS"]

    monkeypatch.setattr(network, "make_server", make)
    served = MachineNetwork(folder=folder)
    served.serve_aws(application, "us-east-1")
    yield served, servers[0].port
    servers[0].shutdown()
    servers[0].server_close()


def test_a_machine_that_stops_in_a_handshake_keeps_no_other_from_aws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch) as (served, port):
        host = "s3.us-east-1.amazonaws.com"
        context = ssl.create_default_context(cafile=served.authorities)
        with socket.create_connection(("127.0.0.1", port)):
            plain = socket.create_connection(("127.0.0.1", port), timeout=20)
            with context.wrap_socket(plain, server_hostname=host) as secure:
                words = ("GET / HTTP/1.1", f"Host: {host}", "Connection: close", "", "")
                secure.sendall("\r\n".join(words).encode())
                answer = b"".join(iter(lambda: secure.recv(4096), b""))
    assert answer.endswith(b"its AWS")
