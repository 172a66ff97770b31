"""S3's retries in a life are the project's own, whatever botocore's defaults, older or newer."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError

from stacks.guard.settings import quick_client
from tests.simulation.bucket import TRIES
from training.durable.store.s3 import S3Store


@pytest.mark.parametrize(
    ("mode", "most"), [("legacy", "5"), ("standard", "3"), ("adaptive", "7"), ("", "")]
)
def test_a_request_is_tried_as_often_with_any_default_of_botocore(
    mode: str, most: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_RETRY_MODE": mode, "AWS_MAX_ATTEMPTS": most}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    quick_client.cache_clear()
    clients = {"trainer": S3Store("runs", "run-1")._client_for(32.0), "guard": quick_client("s3")}
    tried = {name: _tries(client) for name, client in clients.items()}
    quick_client.cache_clear()
    # The trainer repeats by its own patience, with every part of it in the simulation.
    assert tried == {"trainer": 1, "guard": TRIES}


def _tries(client: Any) -> int:
    asked = 0

    def busy(**_: Any) -> AWSResponse:
        nonlocal asked
        asked += 1
        body = SimpleNamespace(stream=lambda *_, **__: iter([b""]))
        return AWSResponse("https://runs.s3.amazonaws.com", 503, {}, body)

    client.meta.events.register("before-send.s3", busy)
    with mock.patch("botocore.endpoint.time.sleep"), pytest.raises(ClientError):
        client.get_object(Bucket="runs", Key="head.json")
    return asked
