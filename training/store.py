"""Where runs and datasets are kept: S3 or a folder. The only file that imports boto3.

A conditional write is tried once here and never repeated behind the caller's back: who holds the
nonce (training/head.py) decides after a lost answer. Everything else is retried by botocore. A key
is only ever written whole: readers of a folder never see half a file, as readers of S3 never do.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from training.errors import UserError

_MEBIBYTE = 1024 * 1024
# S3 answers 409 when another conditional write of the same key is under way; it passes by itself.
_CONFLICT_ATTEMPTS = 8


class StoreError(RuntimeError):
    """The store does not do what it should: one sentence with the key and the store's own words."""


class PreconditionFailedError(StoreError):
    """The key is not (or no longer) what the conditional write expected."""


class AnswerLostError(StoreError):
    """A conditional write may or may not have happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One object's content and the tag that a conditional write names."""

    data: bytes
    etag: str


class Store(Protocol):
    """Keys are relative, with slashes; prefixes end with a slash or are empty."""

    @property
    def uri(self) -> str:
        """As a person would write it."""

    def get(self, key: str) -> Stored | None:
        """The object, or None."""

    def put(self, key: str, data: bytes) -> None:
        """Write whatever stands there now."""

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Write if the key's tag is `etag` (None: if there is no such key); return the new tag."""

    def get_file(self, key: str, path: Path) -> None:
        """Download into `path`, whose folder exists; FileNotFoundError if there is no such key."""

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file of any size."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every key below `prefix`, keys relative to the store."""

    def delete_below(self, prefix: str) -> None:
        """Delete every key below `prefix`, which may be none."""


def open_store(uri: str) -> Store:
    """Open `s3://bucket/prefix` or a folder, which need not exist yet."""
    if uri.startswith("s3://"):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise UserError(f"the URI {uri!r} names no bucket; write s3://bucket/prefix")
        return S3Store(bucket, prefix.strip("/"))
    if "://" in uri or not uri:
        raise UserError(
            f"the URI {uri!r} is neither s3://bucket/prefix nor a folder; give one of them"
        )
    return FolderStore(Path(uri))


class FolderStore:
    """A folder. Writes are: a file beside the target, fsync, rename, fsync of the folder."""

    def __init__(self, root: Path) -> None:
        if root.exists() and not root.is_dir():
            raise UserError(f"{root} is a file; give a folder")
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return str(self._root)

    def get(self, key: str) -> Stored | None:
        try:
            data = (self._root / key).read_bytes()
        except FileNotFoundError:
            return None
        return Stored(data=data, etag=hashlib.sha256(data).hexdigest())

    def put(self, key: str, data: bytes) -> None:
        with self._replacing(key) as part, part.open("wb") as stream:
            stream.write(data)

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        self._root.mkdir(parents=True, exist_ok=True)
        # flock belongs to the open file, so it keeps threads of one process apart, unlike lockf.
        with (self._root / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self.get(key)
            if (found.etag if found else None) != etag:
                raise PreconditionFailedError(f"{self.uri}/{key} is not what it was")
            self.put(key, data)
        return hashlib.sha256(data).hexdigest()

    def get_file(self, key: str, path: Path) -> None:
        shutil.copyfile(self._root / key, path)

    def put_file(self, key: str, path: Path) -> None:
        with self._replacing(key) as part:
            shutil.copyfile(path, part)

    def sizes(self, prefix: str) -> dict[str, int]:
        folder = self._root / prefix
        files = (file for file in folder.rglob("*") if not file.name.startswith("."))
        return {
            file.relative_to(self._root).as_posix(): file.stat().st_size
            for file in sorted(files)
            if file.is_file()
        }

    def delete_below(self, prefix: str) -> None:
        if (self._root / prefix).is_dir():
            shutil.rmtree(self._root / prefix)

    @contextmanager
    def _replacing(self, key: str) -> Iterator[Path]:
        target = self._root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            yield part
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class S3Store:
    """A prefix of a bucket; region, credentials and endpoint are found as the AWS CLI does."""

    def __init__(self, bucket: str, prefix: str) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        session = boto3.session.Session()
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
        self._transfer = TransferConfig(
            multipart_threshold=64 * _MEBIBYTE,
            multipart_chunksize=16 * _MEBIBYTE,
            max_concurrency=8,
        )

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def get(self, key: str) -> Stored | None:
        with self._errors(key):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
                return Stored(data=answer["Body"].read(), etag=answer["ETag"])
            except self._client.exceptions.NoSuchKey:
                return None

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
        with self._errors(key):
            self._client.download_file(
                self._bucket, self._prefix + key, str(path), Config=self._transfer
            )

    def put_file(self, key: str, path: Path) -> None:
        with self._errors(key):
            self._client.upload_file(
                str(path), self._bucket, self._prefix + key, Config=self._transfer
            )

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

    def delete_below(self, prefix: str) -> None:
        keys = [{"Key": self._prefix + key} for key in self.sizes(prefix)]
        with self._errors(prefix):
            for start in range(0, len(keys), 1000):
                self._client.delete_objects(
                    Bucket=self._bucket,
                    Delete={"Objects": keys[start : start + 1000], "Quiet": True},
                )

    @contextmanager
    def _errors(self, key: str, *, conditional: bool = False) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            yield
        except ClientError as error:
            if conditional and _status(error) == 409:
                raise
            self._refuse(key, error, conditional=conditional)
        except NoCredentialsError as error:
            raise UserError(
                f"{self.uri}: no AWS credentials found; give a role or a profile"
            ) from error
        except (BotoCoreError, Boto3Error) as error:
            kind = AnswerLostError if conditional else StoreError
            raise kind(f"{self.uri}/{key}: {error}") from error

    def _refuse(self, key: str, error: Any, *, conditional: bool) -> NoReturn:
        code, status = error.response["Error"]["Code"], _status(error)
        where = f"{self.uri}/{key}"
        if code == "NoSuchBucket":
            raise UserError(f"there is no bucket {self._bucket!r}; check {self.uri}") from error
        if conditional and status in (404, 412):
            raise PreconditionFailedError(f"{where} is not what it was") from error
        if conditional and (status >= 500 or code in ("RequestTimeout", "SlowDown")):
            raise AnswerLostError(f"{where}: {error}") from error
        if status == 404:
            raise FileNotFoundError(where) from error
        raise StoreError(f"{where}: {error}") from error


def _status(error: Any) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
