"""A store in an S3 bucket. The only file that imports boto3.

A conditional write is tried once and never retried without the caller's knowledge: after a lost
response the nonce (record/head.py) decides. All else is retried here, request by request:
botocore's own retries, which differ between its versions, are off. Each part of an upload is
retried by itself, with its checksum; only the process that started an upload completes or aborts
it. Parts have S3's XXHASH128 where the service has once said back what it compared, else SHA-256.
"""

import base64
import hashlib
import io
import logging
import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from contract.aws_errors import (
    DENIED,
    SettingsError,
    checked,
    explain,
    settings_checked,
    settings_fault,
)
from contract.errors import UserError
from training.durable.store.part_process import PartProcess
from training.durable.store.protocol import (
    AnswerLostError,
    CredentialsError,
    LastingError,
    Patience,
    PreconditionFailedError,
    Stored,
    StoreError,
    Upload,
    read_all,
    refuse_outside,
    writing,
)
from training.durable.store.s3_ranges import RangeReader, UnsureError, reader_like
from training.durable.store.transfer import (
    has_fast_hash,
    is_fast_digest,
    new_hash,
    num_parts,
    receive_file,
    send_file,
)

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_CONNECT_SECONDS = 5.0
# The longest silence of a connection, in powers of two; less when the time left is short.
_READ_SECONDS, _CONDITIONAL_SECONDS = 32.0, 8.0
# S3's name for xxh128, and a part that asks whether the service compares it.
_FAST, _PROBE = "XXHASH128", b"Is this compared?"
# Trouble is reported once it has lasted for so long, and again after as long.
_LINE_SECONDS = 5.0
# How many of our own requests may fail, before any has worked, until botocore makes them all.
_MOST_DOUBTS = 8
# Errors that are not our mistake, whatever their status: the body was cut off or damaged in
# transit (400), or one of many keys could not be deleted (200).
_REPEATABLE = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}
_REPEATABLE |= {"InternalError", "ServiceUnavailable", "SlowDown"}
# Answers that every machine would get until somebody acts. Not a denial: a policy that was just
# changed, or a role that was just made, takes effect within minutes.
_KEY = "its objects stay unreadable until then"
_LASTING = {
    "InvalidObjectState": "it is archived (GLACIER, DEEP_ARCHIVE); go on some hours after `aws "
    "s3api restore-object --bucket {bucket} --key {key} --restore-request Days=7`",
    "KeyTooLongError": "shorten the file's name or the prefix to 1,024 bytes together",
    "KMS.DisabledException": f"enable the key (aws kms enable-key): {_KEY}",
    "KMS.KMSInvalidStateException": f"keep the key (aws kms cancel-key-deletion): {_KEY}",
    "KMS.NotFoundException": "name a key of the bucket's region in the bucket's encryption",
}


class S3Store:
    """A prefix of a bucket; region, credentials and endpoint are found as the AWS CLI does."""

    # One connection carries 50 to 100 MB/s; 16 saturate 10 Gb/s.
    num_threads = 16

    def __init__(self, bucket: str, prefix: str, near: "S3Store | None" = None) -> None:
        """`near` is a store of the same bucket, whose connections it uses."""
        import botocore.session

        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self.part_process = PartProcess(bucket, prefix)
        self.patience = Patience()
        self._session: Any = near._session if near else botocore.session.Session()
        # By the seconds of their timeouts.
        self._clients: dict[float, Any] = near._clients if near else {}
        self._lock: threading.Lock = near._lock if near else threading.Lock()
        self._warned = 0.0
        self.compares_fast: bool | None = None  # whether it knows XXHASH128; None: not asked yet
        self._reader: RangeReader | None = None
        self._doubts = 0
        with self._errors(""):
            # The CLI, the other SDKs and SageMaker's containers use this variable, which botocore
            # does not read: without a region each request would go to us-east-1 first.
            if not self._session.get_config_variable("region"):
                self._session.set_config_variable("region", os.environ.get("AWS_REGION"))
            self._client_for(_READ_SECONDS)  # finds wrong settings now

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def get(self, key: str) -> Stored | None:
        def read(client: Any) -> Stored:
            answer = client.get_object(**self._at(key))
            # botocore reports a body that breaks off, but does not request it again.
            return Stored(data=answer["Body"].read(), etag=answer["ETag"])

        try:
            return self.repeating(key, read)
        except FileNotFoundError:
            return None

    def put(self, key: str, data: bytes) -> None:
        digest = hashlib.sha256(data).digest()
        self.put_part(threading.Event(), self._at(key), 0, memoryview(data), digest)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        with self._errors(key, conditional=True):
            client = self._client_for(_CONDITIONAL_SECONDS)
            return str(client.put_object(**self._at(key), Body=data, **condition)["ETag"])

    def get_file(self, key: str, path: Path) -> None:
        about = self.repeating(key, lambda client: client.head_object(**self._at(key)))
        with writing(path):
            receive_file(self, key, about["ContentLength"], path)

    def put_file(self, key: str, path: Path) -> None:
        with writing(path):
            send_file(self, key, path)

    def upload(
        self, key: str, size: int, part_bytes: int, stop: threading.Event, may_be_fast: bool = False
    ) -> Upload:
        """Start an upload: one request if it is one part, else a multipart upload."""
        count = num_parts(size, part_bytes)
        is_fast = count > 1 and may_be_fast and has_fast_hash() and self._is_fast_compared(key)
        return _S3Upload(self, key, stop, count, is_fast)

    def put_part(
        self,
        stop: threading.Event,
        where: dict[str, str],
        number: int,
        data: memoryview,
        digest: bytes,
    ) -> str:
        """Send a part of an upload, or the whole object if it has no others; return its ETag.

        The upload may be one that another process started.
        """
        checksum = _checksum_of(digest)

        def send(client: Any) -> Any:
            body: Any = Body(data) if len(data) else b""
            if "UploadId" not in where:
                return client.put_object(**where, Body=body, **checksum)
            return client.upload_part(**where, PartNumber=number + 1, Body=body, **checksum)

        key = where["Key"].removeprefix(self._prefix)
        return str(self.repeating(key, send, stop)["ETag"])

    def _is_fast_compared(self, key: str) -> bool:
        """Whether the service compares xxh128: then it returns it for the part of an upload.

        Asked once, by an upload that is aborted. In trouble, this process keeps to SHA-256, which
        costs time alone.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        if (found := self.compares_fast) is None:
            found, where = False, self._at(key)
            sent = _checksum_of(new_hash(_PROBE, is_fast=True).digest())
            sent["ChecksumAlgorithm"] = _FAST
            with suppress(ClientError, BotoCoreError, SettingsError):
                client = self._client_for(_CONDITIONAL_SECONDS)
                begun = client.create_multipart_upload(**where, ChecksumAlgorithm=_FAST)
                where["UploadId"] = begun["UploadId"]
                answer = client.upload_part(**where, PartNumber=1, Body=_PROBE, **sent)
                found = sent[f"Checksum{_FAST}"] == answer.get(f"Checksum{_FAST}")
                client.abort_multipart_upload(**where)
            self.compares_fast = found
        return found

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        refuse_outside(self.uri, key)
        if not len(data) or self._has_read(key, start, data):
            return

        def read(client: Any) -> None:
            span = f"bytes={start}-{start + len(data) - 1}"
            body = client.get_object(**self._at(key), Range=span)["Body"]
            read_all(body, data, f"{self.uri}/{key} ends before byte {start + len(data)}")

        self.repeating(key, read)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

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

    def _client_for(self, longest: float) -> Any:
        """Return a client that tries once, and is silent for `longest` or half of the time left."""
        from botocore.config import Config

        checked(self._session, needs_some=False)
        seconds = min(longest, max(1.0, self.patience.seconds_left / 2))
        seconds = 2.0 ** int(math.log2(seconds))
        with self._lock:
            if seconds not in self._clients:
                config = Config(
                    retries={"mode": "standard", "total_max_attempts": 1},
                    connect_timeout=min(_CONNECT_SECONDS, seconds),
                    read_timeout=seconds,
                    max_pool_connections=32,
                    # Each body's checksum is in a signed header; signing it would hash it again.
                    s3={"payload_signing_enabled": False},
                )
                with settings_checked():
                    client = self._session.create_client("s3", config=config)
                client.meta.events.register("before-send.s3.GetObject", self._learn)
                self._clients[seconds] = client
            return self._clients[seconds]

    def repeating(
        self, key: str, call: Callable[[Any], _Answer], stop: threading.Event | None = None
    ) -> _Answer:
        """Repeat the call, given a client, until it succeeds, is answered or patience ends."""
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
        from urllib3.exceptions import HTTPError

        stop = stop or threading.Event()
        pauses, began = self.patience.pauses(), time.monotonic()
        next(pauses)
        with self._errors(key):
            while True:
                try:
                    try:
                        answer = call(self._client_for(_READ_SECONDS))
                    except HTTPError as error:  # such as TLS's, of a body: botocore passes it on
                        raise HTTPClientError(error=error) from error
                    self.patience.is_reached = True
                    return answer
                except (ClientError, BotoCoreError, SettingsError) as error:
                    has_worked = self.patience.is_reached
                    self.patience.is_reached |= isinstance(error, ClientError)
                    is_due = _is_repeatable(error) or isinstance(error, SettingsError) & has_worked
                    pause = next(pauses, None) if is_due else None
                    if pause is None or stop.is_set():
                        raise
                    now = time.monotonic()
                    if now - max(began, self._warned) >= _LINE_SECONDS:
                        self._warned = now
                        _log.warning("[store] %s/%s: %s; retrying", self.uri, key, error)
                    if stop.wait(pause):
                        raise

    def _pages(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing."""
        asked = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, **more}
        while True:
            page = self.repeating(prefix, lambda client: client.list_objects_v2(**asked))
            yield page
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def sizes(self, prefix: str) -> dict[str, int]:
        return {
            entry["Key"].removeprefix(self._prefix): entry["Size"]
            for page in self._pages(prefix)
            for entry in page.get("Contents", [])
        }

    def folders(self, prefix: str) -> set[str]:
        return {
            entry["Prefix"].removeprefix(self._prefix + prefix).removesuffix("/")
            for page in self._pages(prefix, Delimiter="/")
            for entry in page.get("CommonPrefixes", [])
        }

    def delete_below(self, prefix: str) -> None:
        self.delete(self.sizes(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        from botocore.exceptions import ClientError

        def delete(some: list[dict[str, str]], client: Any) -> None:
            answer = client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": some, "Quiet": True}
            )
            # The call succeeds even if single objects are refused, or fail.
            for error in answer.get("Errors", ()):
                refusal = {"Error": error, "ResponseMetadata": answer["ResponseMetadata"]}
                raise ClientError(refusal, "DeleteObjects")

        found = [{"Key": self._prefix + key} for key in keys]
        for some in (found[start : start + 1000] for start in range(0, len(found), 1000)):
            first = some[0]["Key"].removeprefix(self._prefix)
            self.repeating(first, partial(delete, some))

    def sweep(self, prefix: str) -> None:
        """No-op: the bucket's lifecycle rule deletes unfinished uploads after a day."""

    @contextmanager
    def _errors(self, key: str, *, conditional: bool = False) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        refuse_outside(self.uri, key)
        try:
            yield
        except ClientError as error:
            self._refuse(key, error, conditional=conditional)
        except (BotoCoreError, SettingsError) as error:
            fault = settings_fault(error)
            if isinstance(error, NoCredentialsError) and not self.patience.is_attended:
                # Not necessarily the user's mistake: an instance's metadata may be down for a
                # moment.
                raise CredentialsError(
                    f"{self.uri}: no AWS credentials found; configure a role or a profile"
                ) from error
            # What has worked before may do so again.
            if fault and not self.patience.is_reached:
                raise LastingError(f"{self.uri}: {fault}") from error
            kind = AnswerLostError if conditional else StoreError
            raise kind(f"{self.uri}/{key}: {fault or error}") from error

    def _refuse(self, key: str, error: Any, *, conditional: bool) -> NoReturn:
        code, status = error.response["Error"]["Code"], _status(error)
        where = f"{self.uri}/{key}"
        if code == "NoSuchBucket":
            raise UserError(f"no such bucket: {self._bucket!r}; check {self.uri}") from error
        if conditional and status in (404, 412):
            raise PreconditionFailedError(f"{where} has changed") from error
        # A 409: another conditional write of the key is in progress.
        if conditional and _is_repeatable(error):
            raise AnswerLostError(f"{where}: {error}") from error
        if status == 404 and code != "NoSuchUpload" and not code.startswith("KMS."):
            raise FileNotFoundError(where) from error
        if code in _LASTING:
            named = {"bucket": self._bucket, "key": shlex.quote(self._prefix + key)}
            raise LastingError(f"{where}: {error}; {_LASTING[code].format(**named)}") from error
        if (advice := explain(error)) and self.patience.is_attended and code not in DENIED:
            raise LastingError(f"{where}: {advice}") from error
        raise StoreError(f"{where}: {error}" + (f"; {advice}" if advice else "")) from error


def _is_repeatable(error: Any) -> bool:
    """Whether it is trouble that passes, and not an answer, such as 403, or a wrong setting."""
    from botocore import exceptions as known

    if isinstance(error, known.ClientError):
        code, status = error.response["Error"]["Code"], _status(error)
        return status in (409, 429) or status >= 500 or code in _REPEATABLE or "Throttl" in code
    sent = known.ConnectionError, known.HTTPClientError, known.IncompleteReadError
    role = known.CredentialRetrievalError, known.MetadataRetrievalError
    read = known.ChecksumError, known.FlexibleChecksumError
    return isinstance(error, (*sent, *role, *read))


def _status(error: Any) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _checksum_of(digest: bytes) -> dict[str, str]:
    """Return the digest as a request's checksum."""
    name = _FAST if is_fast_digest(digest) else "SHA256"
    return {f"Checksum{name}": base64.b64encode(digest).decode()}


_MEBIBYTE = 1024 * 1024


class _S3Upload(Upload):
    """An upload by this process; parts in shared memory are sent by the store's other process."""

    def __init__(
        self, store: S3Store, key: str, stop: threading.Event, count: int, is_fast: bool
    ) -> None:
        """`count` is the number of parts."""
        where = store._at(key)
        self._store, self._stop, self._where, self.is_fast = store, stop, where, is_fast
        self._repeating = partial(store.repeating, key, stop=stop)
        self._parts: list[dict[str, Any]] = [{}] * count
        if count > 1:
            name = _FAST if is_fast else "SHA256"
            answer = self._repeating(
                lambda client: client.create_multipart_upload(**where, ChecksumAlgorithm=name)
            )
            self._where = {**where, "UploadId": answer["UploadId"]}

    def put(self, number: int, start: int, data: memoryview, digest: bytes) -> None:
        tag = self._store.put_part(self._stop, self._where, number, data, digest)
        self._arrived(number, tag, digest)

    def is_ready(self) -> bool:
        return self._store.part_process.is_ready()

    def put_shared(
        self, memory: int, size: int, part_bytes: int, must_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, bytes]]:
        store, order = self._store, {"where": self._where, "size": size, "part_bytes": part_bytes}
        order |= {"deadline": store.patience.deadline(), "is_fast": self.is_fast}
        for number, tag, digest in store.part_process.send(order, memory, must_stop):
            self._arrived(number, tag, digest)
            yield number, digest

    def finish(self) -> None:
        if "UploadId" not in self._where:
            return

        def complete(client: Any) -> None:
            whole = {"Parts": self._parts}
            try:
                client.complete_multipart_upload(**self._where, MultipartUpload=whole)
            except client.exceptions.NoSuchUpload:
                # Completed by an earlier attempt whose response was lost, or it does not exist.
                where = {"Bucket": self._where["Bucket"], "Prefix": self._where["Key"]}
                if not client.list_objects_v2(**where, MaxKeys=1).get("Contents"):
                    raise

        try:
            self._repeating(complete)
        except StoreError:
            if self.is_fast:  # whatever it has against this checksum, the next try does without
                self._store.compares_fast = False
            raise

    def abort(self) -> None:
        """Try once: the bucket's lifecycle rule deletes what is left after a day."""
        from botocore.exceptions import BotoCoreError, ClientError

        if "UploadId" in self._where:
            with suppress(ClientError, BotoCoreError):
                client = self._store._client_for(_CONDITIONAL_SECONDS)
                client.abort_multipart_upload(**self._where)

    def _arrived(self, number: int, tag: str, digest: bytes) -> None:
        self._parts[number] = {"PartNumber": number + 1, "ETag": tag, **_checksum_of(digest)}


class Body(io.RawIOBase):
    """Memory as a request's body, sent without a copy in blocks of one mebibyte."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> Any:
        # The sender asks for 16 KiB at a time, and would take the interpreter lock for each.
        block = self._data[self._at : self._at + max(size, _MEBIBYTE)]
        self._at += len(block)
        return block
