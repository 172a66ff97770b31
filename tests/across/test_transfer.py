"""The embedded AWS compares what arrives with its checksum, as S3 does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from embedded_aws import EmbeddedAws
from tests.training.serving import KEYS, new_bucket
from tests.training.transfers import DATA, MEBIBYTE, Memory, client_of, is_whole, sent
from tests.training.transfers import checksum as checksum
from training.durable.store.folder import open_store


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as aws:
        KEYS[aws.endpoint] = aws.environment()["AWS_ACCESS_KEY_ID"]
        yield aws


@pytest.mark.parametrize("where", ["in flight", "in memory"])
def test_s3_refuses_a_part_that_was_flipped_since_it_was_hashed(
    aws: EmbeddedAws, checksum: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(new_bucket(aws.endpoint, monkeypatch))
    file, refused, client = Memory(), list[str](), client_of(store)
    real: Callable[..., Any] = client.upload_part

    def upload_part(**about: Any) -> Any:
        if about["PartNumber"] == 2 and not refused:
            body = bytearray(about["Body"]._data)
            body[-1] ^= 1
            if where == "in memory":
                file.data[10 * MEBIBYTE - 1] ^= 1
                body = bytearray(file.data[5 * MEBIBYTE : 10 * MEBIBYTE])
            about["Body"] = bytes(body)
            try:
                return real(**about)
            except client.exceptions.ClientError as error:
                refused.append(error.response["Error"]["Code"])
                file.data[:] = DATA
                raise
        return real(**about)

    monkeypatch.setattr(client, "upload_part", upload_part)
    entry = sent(store, file)
    assert refused == ["BadDigest"]
    assert is_whole(store, entry)
