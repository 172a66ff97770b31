"""A store in an S3 bucket. The only file that imports boto3.

A conditional write is tried once and never retried without the caller's knowledge: after a lost
response the nonce (training/record/head.py) decides. Parts of large objects are retried here, one
by one, and everything else by botocore.
"""

import base64
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from training.errors import UserError
from training.store.part_process import PartProcess
from training.store.protocol import (
    AnswerLostError,
    CredentialsError,
    PreconditionFailedError,
    Stored,
    StoreError,
    Upload,
    refuse_outside,
    writing,
)
from training.store.s3_transfer import Body, RangeReader, S3Upload, UnsureError, reader_like

_Answer = TypeVar("_Answer")

_MEBIBYTE = 1024 * 1024
# S3 answers 409 while another conditional write of the same key is in progress.
_CONFLICT_ATTEMPTS = 8
# Per part: with full jitter of up to 10 s in between, enough for about half a minute of trouble.
_PART_ATTEMPTS = 8
_LONGEST_BACKOFF_SECONDS = 10.0
# How many of our own requests may fail, before any has worked, until botocore makes them all.
_MOST_DOUBTS = 8
# Errors of status 400 that are not our mistake: the body was cut off or damaged in transit.
_REPEATABLE = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}


class S3Store:
    """A prefix of a bucket; region, credentials and endpoint are found as the AWS CLI does."""

    # One connection carries 50 to 100 MB/s; 16 saturate 10 Gb/s.
    num_threads = 16

    def __init__(self, bucket: str, prefix: str) -> None:
        import boto3
        import botocore.session
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self.part_process = PartProcess(bucket, prefix)
        self._session = botocore.session.Session()
        # The CLI, the other SDKs and SageMaker's containers use this variable, which botocore does
        # not read: without a region each request would go to us-east-1 first.
        if not self._session.get_config_variable("region"):
            self._session.set_config_variable("region", os.environ.get("AWS_REGION"))
        session = boto3.session.Session(botocore_session=self._session)
        timeouts: dict[str, Any] = {"connect_timeout": 5, "read_timeout": 30}
        pool = {"max_pool_connections": 32}
        self._client = session.client(
            "s3",
            config=Config(
                retries={"mode": "standard", "total_max_attempts": 6}, **timeouts, **pool
            ),
        )
        self._once = session.client(
            "s3",
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=10),
        )
        # Each part's SHA-256 is in a signed header; signing the body would hash it again.
        self._parts = session.client(
            "s3",
            config=Config(
                retries={"total_max_attempts": 1},
                s3={"payload_signing_enabled": False},
                **timeouts,
                **pool,
            ),
        )
        self._reader: RangeReader | None = None
        self._doubts = 0
        self._parts.meta.events.register("before-send.s3.GetObject", self._learn)
        self._transfer = TransferConfig(
            multipart_threshold=64 * _MEBIBYTE,
            multipart_chunksize=16 * _MEBIBYTE,
            max_concurrency=8,
        )

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def get(self, key: str) -> Stored | None:
        def read() -> Stored | None:
            try:
                answer = self._parts.get_object(Bucket=self._bucket, Key=self._prefix + key)
                # botocore reports a body that breaks off, but does not request it again.
                return Stored(data=answer["Body"].read(), etag=answer["ETag"])
            except self._parts.exceptions.NoSuchKey:
                return None

        try:
            return self._repeating(key, threading.Event(), read)
        except FileNotFoundError:
            return None  # a 404 whose body with the code NoSuchKey did not arrive

    def put(self, key: str, data: bytes) -> None:
        with self._errors(key):
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        for attempt in range(_CONFLICT_ATTEMPTS):
            try:
                with self._errors(key, conditional=True):
                    answer = self._once.put_object(
                        Bucket=self._bucket, Key=self._prefix + key, Body=data, **condition
                    )
                    return str(answer["ETag"])
            except ClientError as error:
                if _status(error) != 409:
                    raise
                time.sleep(0.05 * 2**attempt)
        raise AnswerLostError(f"{self.uri}/{key}: 409 from S3 {_CONFLICT_ATTEMPTS} times in a row")

    def get_file(self, key: str, path: Path) -> None:
        # Not download_file: it writes a file next to `path`, and leaves it there when killed.
        with self._errors(key), writing(path), path.open("wb") as file:
            self._client.download_fileobj(
                self._bucket, self._prefix + key, file, Config=self._transfer
            )

    def put_file(self, key: str, path: Path) -> None:
        with self._errors(key):
            self._client.upload_file(
                str(path), self._bucket, self._prefix + key, Config=self._transfer
            )

    def upload(self, key: str, size: int, part_bytes: int, stop: threading.Event) -> Upload:
        """Start an upload: one request if it is one part, else a multipart upload."""
        return S3Upload(
            self._parts,
            partial(self._repeating, key, stop),
            partial(self.put_part, stop),
            {"Bucket": self._bucket, "Key": self._prefix + key},
            num_parts=max(1, -(-size // part_bytes)),
            process=self.part_process,
            abort=self._abort,
        )

    def put_part(
        self,
        stop: threading.Event,
        where: dict[str, str],
        number: int,
        data: memoryview,
        sha256: bytes,
    ) -> str:
        """Send a part of an upload, or the whole object if it has no others; return its ETag.

        The upload may be one that another process started.
        """
        checksum = base64.b64encode(sha256).decode()

        def send() -> Any:
            body: Any = Body(data) if len(data) else b""
            if "UploadId" not in where:
                return self._parts.put_object(**where, Body=body, ChecksumSHA256=checksum)
            return self._parts.upload_part(
                **where, PartNumber=number + 1, Body=body, ChecksumSHA256=checksum
            )

        key = where["Key"].removeprefix(self._prefix)
        return str(self._repeating(key, stop, send)["ETag"])

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        refuse_outside(self.uri, key)
        if not len(data) or self._has_read(key, start, data):
            return
        where = {"Bucket": self._bucket, "Key": self._prefix + key}

        def read() -> None:
            span = f"bytes={start}-{start + len(data) - 1}"
            body = self._parts.get_object(**where, Range=span)["Body"]
            done = 0
            while done < len(data):
                count = body.readinto(data[done:])
                if not count:
                    raise StoreError(f"{self.uri}/{key} ends before byte {start + len(data)}")
                done += count

        self._repeating(key, threading.Event(), read)

    def _learn(self, request: Any, **_: Any) -> None:
        """Learn from botocore's first request where the bucket answers, and how to sign."""
        from botocore.httpsession import get_cert_path
        from botocore.utils import get_environ_proxies

        if self._reader is None and not get_environ_proxies(request.url):
            trusted = self._session.get_config_variable("ca_bundle") or get_cert_path(True)
            found = self._session.get_credentials()
            with suppress(OSError):  # no such certificates: botocore will say so
                self._reader = reader_like(request, self._bucket, found, trusted)

    def _has_read(self, key: str, start: int, data: memoryview) -> bool:
        """Read with our own request; False leaves anything unusual to botocore."""
        if self._reader is None or self._doubts >= _MOST_DOUBTS:
            return False
        try:
            self._reader.read_into(self._prefix + key, start, data)
        except UnsureError:
            # Counted until one has worked; after that, only the one request is at fault.
            self._doubts += self._doubts >= 0
            return False
        self._doubts = -1
        return True

    def _repeating(self, key: str, stop: threading.Event, call: Callable[[], _Answer]) -> _Answer:
        """Retry with backoff until the call succeeds or fails with a permanent error."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        for attempt in range(1, _PART_ATTEMPTS + 1):
            with self._errors(key):
                try:
                    return call()
                except (ClientError, BotoCoreError) as error:
                    is_final = isinstance(error, NoCredentialsError) or (
                        isinstance(error, ClientError) and not _is_repeatable(error)
                    )
                    if is_final or attempt == _PART_ATTEMPTS or stop.is_set():
                        raise
            stop.wait(random.uniform(0, min(_LONGEST_BACKOFF_SECONDS, 0.1 * 2**attempt)))
        raise AssertionError("the last attempt returns or raises")

    def sizes(self, prefix: str) -> dict[str, int]:
        with self._errors(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return {
                entry["Key"].removeprefix(self._prefix): entry["Size"]
                for page in pages
                for entry in page.get("Contents", [])
            }

    def folders(self, prefix: str) -> set[str]:
        below = self._prefix + prefix
        with self._errors(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=below, Delimiter="/"
            )
            return {
                entry["Prefix"].removeprefix(below).removesuffix("/")
                for page in pages
                for entry in page.get("CommonPrefixes", [])
            }

    def delete_below(self, prefix: str) -> None:
        self.delete(self.sizes(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        from botocore.exceptions import ClientError

        found = [{"Key": self._prefix + key} for key in keys]
        for start in range(0, len(found), 1000):
            some = found[start : start + 1000]
            with self._errors(some[0]["Key"].removeprefix(self._prefix)):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": some, "Quiet": True}
                )
                # The call succeeds even if single objects are refused, or fail.
                for error in answer.get("Errors", ()):
                    said = {"Error": error, "ResponseMetadata": answer["ResponseMetadata"]}
                    raise ClientError(said, "DeleteObjects")

    def sweep(self, prefix: str) -> None:
        """No-op: the bucket's lifecycle rule deletes unfinished uploads after a day."""

    def _abort(self, where: dict[str, str]) -> None:
        """Try once: the bucket's lifecycle rule deletes what is left after a day."""
        from botocore.exceptions import BotoCoreError, ClientError

        with suppress(ClientError, BotoCoreError):
            self._once.abort_multipart_upload(**where)

    @contextmanager
    def _errors(self, key: str, *, conditional: bool = False) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        refuse_outside(self.uri, key)
        try:
            yield
        except ClientError as error:
            if conditional and _status(error) == 409:
                raise
            self._refuse(key, error, conditional=conditional)
        except NoCredentialsError as error:
            # Not necessarily the user's mistake: an instance's metadata may be down for a moment.
            raise CredentialsError(
                f"{self.uri}: no AWS credentials found; configure a role or a profile"
            ) from error
        except (BotoCoreError, Boto3Error) as error:
            kind = AnswerLostError if conditional else StoreError
            raise kind(f"{self.uri}/{key}: {error}") from error

    def _refuse(self, key: str, error: Any, *, conditional: bool) -> NoReturn:
        code, status = error.response["Error"]["Code"], _status(error)
        where = f"{self.uri}/{key}"
        if code == "NoSuchBucket":
            raise UserError(f"no such bucket: {self._bucket!r}; check {self.uri}") from error
        if conditional and status in (404, 412):
            raise PreconditionFailedError(f"{where} has changed") from error
        if conditional and (status >= 500 or code in ("RequestTimeout", "SlowDown")):
            raise AnswerLostError(f"{where}: {error}") from error
        if status == 404:
            raise FileNotFoundError(where) from error
        raise StoreError(f"{where}: {error}") from error


def _is_repeatable(error: Any) -> bool:
    code = error.response["Error"]["Code"]
    return _status(error) in (409, 429) or _status(error) >= 500 or code in _REPEATABLE


def _status(error: Any) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
