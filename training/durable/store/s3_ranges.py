"""Reads ranges from S3 on sockets that are kept open, with a tenth of botocore's work.

It accepts only answers that it is sure of; after any other, botocore asks again, and knows
redirects, retries and words for errors.
"""

import hashlib
import hmac
import os
import re
import socket
import ssl
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 30
_HEAD_BYTES = 16 * 1024
_SCOPE = re.compile(rb"Credential=[^/]+/\d{8}/([a-z0-9-]+)/s3/aws4_request")
_SUCCESS = re.compile(rb"HTTP/1\.[01] 20[06] ")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SPAN = re.compile(rb"\r\ncontent-range: *bytes (\d+)-(\d+)/", re.IGNORECASE)
_CLOSES = re.compile(rb"HTTP/1\.0 |[\s\S]*\r\nconnection: *close", re.IGNORECASE)
_UNSIGNED = "UNSIGNED-PAYLOAD"


class UnsureError(Exception):
    """No answer came, or one that is not understood here: another client must ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Where a bucket answers, and the region that a signature names."""

    host: str
    port: int | None  # None: the scheme's
    path: str  # of the bucket: "/bucket", or nothing where the host names it
    region: str

    @property
    def authority(self) -> str:
        """The Host header."""
        return self.host if self.port is None else f"{self.host}:{self.port}"


def reader_like(request: Any, bucket: str, credentials: Any, trusted: str) -> "RangeReader | None":
    """Return a reader of the bucket that botocore's signed request goes to; None for others.

    `credentials` are botocore's, `trusted` is the file of certificates.
    """
    url, signed = urlsplit(request.url), request.headers.get("Authorization", b"")
    scope = _SCOPE.search(signed if isinstance(signed, bytes) else signed.encode())
    if scope is None or url.hostname is None:
        return None
    context = ssl.create_default_context(cafile=trusted) if url.scheme == "https" else None
    # A key may begin like the bucket that the host names.
    is_in_host = url.hostname.startswith(f"{bucket}.")
    is_in_path = url.path.startswith(f"/{bucket}/") and not is_in_host
    where = Bucket(
        host=url.hostname,
        port=url.port,
        path=f"/{bucket}" if is_in_path else "",
        region=scope[1].decode(),
    )
    return RangeReader(where, credentials.get_frozen_credentials, context)


class RangeReader:
    """Connections to one bucket, each used by one thread at a time."""

    def __init__(
        self, bucket: Bucket, credentials: Callable[[], Any], context: ssl.SSLContext | None
    ) -> None:
        """`credentials` returns botocore's, frozen, for each request: a role's expire."""
        self._bucket = bucket
        self._credentials = credentials
        self._context = context
        self._idle: list[socket.socket] = []
        self._owner = os.getpid()
        weakref.finalize(self, _close, self._idle)

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        """Fill `data` with the object's bytes from `start`; UnsureError for any other answer."""
        if self._owner != os.getpid():
            # They are the parent's: this process is a fork, which closes its copies.
            _close(self._idle)
            self._idle.clear()
            self._owner = os.getpid()
        try:
            connection = self._idle.pop()
        except IndexError:
            self._read(self._connect(), key, start, data)
            return
        try:
            self._read(connection, key, start, data)
        except UnsureError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            # The server may have closed it since it was last used.
            self._read(self._connect(), key, start, data)

    def _read(self, connection: socket.socket, key: str, start: int, data: memoryview) -> None:
        try:
            connection.sendall(self._request(key, start, len(data)))
            may_stay = _receive(connection, start, data)
        except Exception as error:  # botocore's too: credentials that cannot be renewed
            connection.close()
            raise UnsureError(str(error)) from error
        except BaseException:
            connection.close()
            raise
        if may_stay:
            self._idle.append(connection)
        else:
            connection.close()

    def _connect(self) -> socket.socket:
        address = (self._bucket.host, self._bucket.port or (443 if self._context else 80))
        try:
            connection = socket.create_connection(address, _CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_hostname=address[0])
        except OSError as error:
            raise UnsureError(str(error)) from error
        connection.settimeout(_READ_SECONDS)
        if self._context is None:
            # The kernel's own timeout: with Python's, each call would be two.
            connection.settimeout(None)
            limit = struct.pack("ll", _READ_SECONDS, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        return connection

    def _request(self, key: str, start: int, size: int) -> bytes:
        found = self._credentials()
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = f"{self._bucket.path}/{quote(key, safe='/~')}"
        signed = {
            "host": self._bucket.authority,
            "x-amz-content-sha256": _UNSIGNED,
            "x-amz-date": now,
        }
        if found.token:
            signed["x-amz-security-token"] = found.token
        lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
        names = ";".join(signed)
        asked = f"GET\n{path}\n\n{lines}\n{names}\n{_UNSIGNED}"
        scope = f"{now[:8]}/{self._bucket.region}/s3/aws4_request"
        digest = hashlib.sha256(asked.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}"
        signature = hmac.digest(_signing_key(found.secret_key, scope), text.encode(), "sha256")
        authorization = (
            f"AWS4-HMAC-SHA256 Credential={found.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature.hex()}"
        )
        return (
            f"GET {path} HTTP/1.1\r\n{lines.replace(chr(10), chr(13) + chr(10))}"
            f"Range: bytes={start}-{start + size - 1}\r\nAuthorization: {authorization}\r\n\r\n"
        ).encode()


@lru_cache(maxsize=1)
def _signing_key(secret: str, scope: str) -> bytes:
    """Derive a day's key."""
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _receive(connection: socket.socket, start: int, data: memoryview) -> bool:
    """Receive the answer's body into `data`; return whether the connection may be used again."""
    head, first = _received_head(connection)
    length, span = _LENGTH.search(head), _SPAN.search(head)
    wanted = (len(data), start, start + len(data) - 1)
    # By its span, not its status: some servers answer 200.
    if (
        not _SUCCESS.match(head)
        or (length is None or span is None)
        or (int(length[1]), int(span[1]), int(span[2])) != wanted
    ):
        raise ValueError("the answer is not the requested range")
    if len(first) > len(data):
        raise ValueError("the answer is more than the requested range")
    data[: len(first)] = first
    done = len(first)
    # The kernel waits for all of it: one call, and one wait for the interpreter's lock.
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    while done < len(data):
        count = connection.recv_into(data[done:], len(data) - done, flags)
        if not count:
            raise ConnectionError("the connection was closed in the middle of an answer")
        done += count
    return _CLOSES.match(head) is None


def _received_head(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receive the answer's head; return it, and what has arrived of the body."""
    head = b""
    while (end := head.find(b"\r\n\r\n")) < 0:
        more = connection.recv(_HEAD_BYTES)
        if not more or len(head) > _HEAD_BYTES:
            raise ConnectionError("the connection was closed in the head of an answer")
        head += more
    return head[:end], head[end + 4 :]


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
