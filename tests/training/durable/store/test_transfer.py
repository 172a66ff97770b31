"""Which hash a transfer has, where a service compares it, and that either finds every flip."""

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.damage import flip
from tests.training.transfers import DATA, MEBIBYTE, Memory, client_of, is_whole, sent
from tests.training.transfers import checksum as checksum
from training.durable.errors import MachineError
from training.durable.store import transfer
from training.durable.store.folder import FolderStore, open_store
from training.durable.store.protocol import StoreError
from training.durable.store.s3 import S3Store
from training.durable.store.transfer import FileEntry

xxhash = pytest.importorskip("xxhash")


def test_a_checksum_is_of_one_kind_and_says_which(
    store_uri: str, checksum: str, tmp_path: Path
) -> None:
    entry = sent(open_store(store_uri), Memory())
    new = xxhash.xxh3_128 if checksum == "xxh128" else hashlib.sha256
    parts = [DATA[at : at + 5 * MEBIBYTE] for at in range(0, len(DATA), 5 * MEBIBYTE)]
    found = {"sha256": entry.sha256, "xxh128": entry.xxh128}
    assert found.pop(checksum) == new(b"".join(new(part).digest() for part in parts)).hexdigest()
    assert list(found.values()) == [""]
    assert is_whole(open_store(store_uri), entry)
    small = sent(FolderStore(tmp_path), Memory(b"abc"))
    assert (small.xxh128 or small.sha256) == new(b"abc").hexdigest()
    named = sent(open_store(store_uri), Memory(is_named_by_content=True))
    assert (bool(named.sha256), named.xxh128) == (True, "")


def test_a_flip_at_rest_is_found(tmp_path: Path, checksum: str) -> None:
    store = FolderStore(tmp_path)
    entry = sent(store, Memory())
    for byte in (0, 5 * MEBIBYTE - 1, 5 * MEBIBYTE, len(DATA) - 1):
        for bit in (0, 7):
            flip(tmp_path / "x/file", byte, bit)
            assert not is_whole(store, entry)
            flip(tmp_path / "x/file", byte, bit)
    assert is_whole(store, entry)


@pytest.mark.parametrize("answer", ["refuses it", "says nothing", "is not there"])
def test_a_service_that_does_not_compare_the_fast_checksum_has_sha_256(
    bucket_uri: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", 5 * MEBIBYTE)
    from botocore.exceptions import ConnectionClosedError

    store, asked = open_store(bucket_uri), list[str]()
    assert isinstance(store, S3Store)
    client = store._client_for(8.0)
    real: Callable[..., Any] = client.upload_part

    def upload_part(**about: Any) -> Any:
        asked.append(about["ChecksumAlgorithm"])
        if answer == "is not there":
            raise ConnectionClosedError(endpoint_url="x")
        if answer == "refuses it":
            about["ChecksumXXHASH128"] = "A" * 22 + "=="
        return {"ETag": real(**about)["ETag"]}

    monkeypatch.setattr(client, "upload_part", upload_part)
    for _ in range(2):
        entry = sent(store, Memory())
        assert entry.sha256 and not entry.xxh128
        assert is_whole(store, entry)
    assert asked == ["XXHASH128"]


def test_a_completion_that_is_refused_is_the_last_with_the_fast_checksum(
    bucket_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", 5 * MEBIBYTE)
    store, named = open_store(bucket_uri), list[list[str]]()
    client = client_of(store)
    real: Callable[..., Any] = client.complete_multipart_upload

    def complete(**about: Any) -> Any:
        named.append([name for name in about["MultipartUpload"]["Parts"][0] if "Check" in name])
        if len(named) == 1:
            answer = {"Error": {"Code": "InvalidPart"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
            raise client.exceptions.ClientError(answer, "CompleteMultipartUpload")
        return real(**about)

    monkeypatch.setattr(client, "complete_multipart_upload", complete)
    with pytest.raises(StoreError, match="InvalidPart"):
        sent(store, Memory())
    assert is_whole(store, sent(store, Memory()))
    assert named == [["ChecksumXXHASH128"], ["ChecksumSHA256"]]


def test_fails_without_xxhash_for_what_was_saved_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    entry = sent(store, Memory(b"abc"))
    monkeypatch.setattr(transfer, "xxh3_128", None)
    with pytest.raises(MachineError, match=r"^file was saved with xxh128, .*pip install xxhash"):
        is_whole(store, entry)


def test_what_either_kind_of_reader_wrote_the_other_reads(tmp_path: Path, checksum: str) -> None:
    """As a head of format 5 names it: SHA-256 alone."""
    store, upload = FolderStore(tmp_path), threading.Event()
    whole = store.upload("x/file", len(DATA), 5 * MEBIBYTE, upload)
    assert not whole.is_fast
    whole.abort()
    store.put("x/file", DATA)
    record = {"name": "file", "bytes": len(DATA), "sha256": hashlib.sha256(DATA).hexdigest()}
    assert is_whole(store, FileEntry.from_json(record))
