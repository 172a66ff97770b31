"""A file in memory on its way to a store and back, with either hash."""

from typing import Any

import pytest

from training.durable.store import transfer
from training.durable.store.protocol import Store
from training.durable.store.s3 import S3Store
from training.durable.store.transfer import (
    Contents,
    FileEntry,
    Spare,
    TransferProgress,
    receive,
    send,
)

MEBIBYTE = 1024 * 1024
DATA = bytes(range(251)) * 50_000  # three parts


@pytest.fixture(params=["xxh128", "sha256"])
def checksum(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checksum that is made, with the package xxhash or without it."""
    monkeypatch.setattr(transfer, "PART_BYTES", 5 * MEBIBYTE)
    if request.param == "sha256":
        monkeypatch.setattr(transfer, "xxh3_128", None)
    return str(request.param)


class Memory(Contents):
    """A file in memory, which may change."""

    name = "file"

    def __init__(self, data: bytes = DATA, *, is_named_by_content: bool = False) -> None:
        self.data = bytearray(data)
        self.is_named_by_content = is_named_by_content

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        return memoryview(self.data)[start:stop]


def sent(store: Store, file: Contents) -> FileEntry:
    return send(store, "x/", [file], TransferProgress())[0]


def is_whole(store: Store, entry: FileEntry) -> bool:
    return receive(store, "x/file", entry, lambda at, data: None)


def client_of(store: Store) -> Any:
    assert isinstance(store, S3Store)
    return store._client_for(32.0)
