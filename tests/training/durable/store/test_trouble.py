"""Trouble of S3 that passes is waited for by every call, however botocore itself would retry."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contract.errors import Exit, UserError
from tests.training.trouble import Trouble, TroubledWay
from training.cli.main import main
from training.durable.store.folder import open_store
from training.durable.store.protocol import Patience, StoreError, attended, put_unless_changed
from training.durable.store.s3 import S3Store
from training.durable.store.transfer import run_all

MEBIBYTE = 1024 * 1024
SECONDS = 2.5  # longer than botocore 1.44 takes for six attempts


@pytest.fixture
def way(s3_endpoint: str) -> Iterator[TroubledWay]:
    with TroubledWay(s3_endpoint) as way:
        yield way


@pytest.fixture
def store(way: TroubledWay, bucket_uri: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setattr("training.durable.store.protocol._LONGEST_PAUSE_SECONDS", 0.3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", way.endpoint)
    store = open_store(f"{bucket_uri}/x")
    assert isinstance(store, S3Store)
    return store


def _upload(store: S3Store, key: str) -> None:
    data = memoryview(bytes(6 * MEBIBYTE))
    upload = store.upload(key, len(data), 5 * MEBIBYTE, threading.Event())
    for number, part in enumerate((data[: 5 * MEBIBYTE], data[5 * MEBIBYTE :])):
        upload.put(number, number * 5 * MEBIBYTE, part, hashlib.sha256(part).digest())
    upload.finish()


@pytest.mark.parametrize("trouble", ["500", "503", "refused", "reset"])
def test_every_call_outlasts_trouble(
    store: S3Store, way: TroubledWay, trouble: Trouble, tmp_path: Path
) -> None:
    for key in ("there/one", "gone/one"):
        store.put(key, b"0123456789")
    (tmp_path / "large").write_bytes(bytes(9 * MEBIBYTE))
    found: dict[str, object] = {}
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: store.get("there/one"),
        "read": lambda: store.read_into("there/one", 3, memoryview(bytearray(4))),
        "download": lambda: store.get_file("there/one", tmp_path / "back"),
        "put": lambda: store.put("new/put", b"1"),
        "put if": lambda: put_unless_changed(store, "new/head", b"1", None),
        "send": lambda: store.put_file("new/file", tmp_path / "large"),
        "upload": lambda: _upload(store, "new/upload"),
        "list": lambda: store.sizes("there/"),
        "folders": lambda: store.folders("there/"),
        "delete": lambda: store.delete(["gone/one"]),
    }
    way.trouble_for(trouble, SECONDS)
    began = time.monotonic()
    run_all([lambda n=n, c=c: found.update({n: c()}) for n, c in calls.items()], len(calls))  # type: ignore[misc]
    assert time.monotonic() - began >= SECONDS
    assert found.keys() == calls.keys()
    assert (tmp_path / "back").read_bytes() == b"0123456789"
    assert found["list"] == {"there/one": 10}
    sizes = {"new/file": 9, "new/head": 0, "new/put": 0, "new/upload": 6}
    large = {key: size // MEBIBYTE for key, size in store.sizes("").items()}
    assert large == {**sizes, "there/one": 0}


def test_fails_at_the_deadline_even_if_s3_is_silent(store: S3Store, way: TroubledWay) -> None:
    store.put("k", b"1")
    deadline = time.monotonic() + 4
    store.patience.deadline = lambda: deadline
    with way.in_trouble("silent"), pytest.raises(StoreError, match="timeout"):
        store.get("k")
    assert -1 < deadline - time.monotonic() < 3, "it was repeated, but not beyond"


@pytest.mark.parametrize(
    ("bucket", "expected", "words"),
    [
        ("none-here", UserError, "no such bucket: 'none-here'"),
        ("Wrong Name", StoreError, "Wrong Name"),
    ],
)
def test_fails_at_once_for_an_answer(
    store: S3Store, bucket: str, expected: type[Exception], words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(expected, match=words):
        open_store(f"s3://{bucket}/x").sizes("")
    assert store.get("nothing") is None
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("left", [None, 118.0, 20.0, 0.5, -3.0])
def test_pauses_fill_the_window_or_the_time_left(
    monkeypatch: pytest.MonkeyPatch, left: float | None
) -> None:
    now = 1000.0
    monkeypatch.setattr("training.durable.store.protocol.time.monotonic", lambda: now)
    patience, ended = Patience(), []
    if left is not None:
        patience.deadline = lambda: 1000.0 + left
    pauses = patience.pauses()
    assert next(pauses) == 0.0
    for pause in pauses:
        assert pause <= 10
        now += pause
        ended.append(now - 1000)
    window = min(90.0, 90.0 if left is None else left)
    assert ended == [] if window < 0 else ended[-1] == pytest.approx(window)
    assert len(ended) < 150, "S3 is not hammered"
    if window >= 90:
        assert sum(seconds > 60 for seconds in ended) >= 3, "a minute of trouble is outlasted"


def test_fails_soon_where_a_person_waits_and_nothing_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("training.durable.store.protocol._UNREACHED_SECONDS", 0.5)
    began = time.monotonic()
    assert main(["report", "--run-uri=s3://bucket/runs/one"]) == Exit.STORE
    assert time.monotonic() - began < 5
    assert "Could not connect" in capsys.readouterr().err
    assert not Patience.is_attended, "what follows in this process is patient again"


def test_a_command_that_was_answered_once_waits_as_a_run_does(
    store: S3Store, way: TroubledWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.durable.store.protocol._UNREACHED_SECONDS", 0.5)
    with attended():
        store.put("k", b"1")
        way.trouble_for("refused", SECONDS)
        assert store.sizes("") == {"k": 1}
