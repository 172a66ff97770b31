"""A server of S3's requests that costs next to nothing: what is measured against it is the client.

`python s3_sink.py [cert.pem]` prints its port, and a second one with TLS, and serves until its
standard input closes; key.pem lies beside the certificate. It returns the checksum that it is sent.
Objects in the bucket `keep` are kept in memory; elsewhere large bodies are thrown away. It verifies
nothing: no signature, no checksum.
"""

import re
import secrets
import socket
import ssl
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_MEBIBYTE = 1024 * 1024
_DATE = "2026-01-01T00:00:00.000Z"
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'

_Headers: TypeAlias = dict[str, str]


@dataclass(slots=True)
class _Object:
    size: int
    data: bytes | bytearray | None  # None: thrown away
    etag: str = field(default_factory=lambda: f'"{secrets.token_hex(16)}"')


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    body: bytes | memoryview = b""
    headers: _Headers = field(default_factory=dict)
    length: int | None = None  # of the body that a HEAD does not send


class _Sink:
    """The objects, and what each request does with them."""

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._parts: dict[str, dict[int, _Object]] = {}  # by upload
        self._lock = threading.Lock()

    def answer(self, method: str, target: str, headers: _Headers, body: _Object) -> _Answer:
        url = urlsplit(target)
        key = unquote(url.path).lstrip("/")
        query = parse_qs(url.query, keep_blank_values=True)
        with self._lock:
            if method == "PUT":
                return self._put(key, query, headers, body)
            if method == "POST":
                return self._post(key, query)
            if method == "DELETE":
                self._parts.pop(query.get("uploadId", [""])[0], None)
                return _Answer("204 No Content")
            if "list-type" in query:
                return self._list(key.split("/")[0], query)
            return self._get(method, key, headers)

    def _put(
        self, key: str, query: dict[str, list[str]], headers: _Headers, body: _Object
    ) -> _Answer:
        sums = {k: v for k, v in headers.items() if k.startswith("x-amz-checksum-")}
        if "uploadId" in query:
            self._parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return _Answer("200 OK", headers={"ETag": body.etag, **sums})
        found = self._objects.get(key)
        wanted = headers.get("if-match")
        if ("if-none-match" in headers and found) or (
            wanted is not None and (found is None or found.etag != wanted)
        ):
            return _error("412 Precondition Failed", "PreconditionFailed")
        self._objects[key] = body
        return _Answer("200 OK", headers={"ETag": body.etag, **sums})

    def _post(self, key: str, query: dict[str, list[str]]) -> _Answer:
        bucket, _, name = key.partition("/")
        about = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key>"
        if "uploads" in query:
            upload = secrets.token_hex(16)
            self._parts[upload] = {}
            return _xml("InitiateMultipartUploadResult", f"{about}<UploadId>{upload}</UploadId>")
        if "uploadId" not in query:  # DeleteObjects
            return _xml("DeleteResult", "")
        parts = [part for _, part in sorted(self._parts.pop(query["uploadId"][0]).items())]
        data = None
        if all(part.data is not None for part in parts):
            data = b"".join(part.data for part in parts if part.data is not None)
        whole = _Object(sum(part.size for part in parts), data)
        self._objects[key] = whole
        return _xml("CompleteMultipartUploadResult", f"{about}<ETag>{escape(whole.etag)}</ETag>")

    def _list(self, bucket: str, query: dict[str, list[str]]) -> _Answer:
        prefix = f"{bucket}/{query.get('prefix', [''])[0]}"
        found = [
            f"<Contents><Key>{escape(key.removeprefix(f'{bucket}/'))}</Key>"
            f"<LastModified>{_DATE}</LastModified><ETag>{escape(one.etag)}</ETag>"
            f"<Size>{one.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, one in sorted(self._objects.items())
            if key.startswith(prefix)
        ]
        about = f"<Name>{bucket}</Name><KeyCount>{len(found)}</KeyCount><MaxKeys>1000</MaxKeys>"
        return _xml("ListBucketResult", about + "<IsTruncated>false</IsTruncated>" + "".join(found))

    def _get(self, method: str, key: str, headers: _Headers) -> _Answer:
        found = self._objects.get(key)
        if found is None or (found.data is None and method == "GET"):
            return _error("404 Not Found", "NoSuchKey")
        about = {
            "ETag": found.etag,
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "Accept-Ranges": "bytes",
        }
        if method == "HEAD":
            return _Answer("200 OK", headers=about, length=found.size)
        assert found.data is not None
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if span is None:
            return _Answer("200 OK", memoryview(found.data), about)
        first, last = int(span[1]), min(int(span[2] or found.size), found.size - 1)
        about["Content-Range"] = f"bytes {first}-{last}/{found.size}"
        return _Answer("206 Partial Content", memoryview(found.data)[first : last + 1], about)


def _xml(name: str, content: str) -> _Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} {_NAMESPACE}>{content}</{name}>'
    return _Answer("200 OK", text.encode(), {"Content-Type": "application/xml"})


def _error(status: str, code: str) -> _Answer:
    text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return _Answer(status, text.encode(), {"Content-Type": "application/xml"})


class _Connection:
    """One connection, for as many requests as the client sends."""

    def __init__(self, sink: _Sink, connection: socket.socket) -> None:
        self._sink = sink
        self._socket = connection
        self._read = bytearray()
        self._block = bytearray(_MEBIBYTE)

    def serve(self) -> None:
        with self._socket:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (head := self._head()) is not None:
                first, *lines = head.decode("latin-1").split("\r\n")
                method, target, _ = first.split(" ", 2)
                pairs = (line.partition(":") for line in lines)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                if headers.get("expect", "").lower() == "100-continue":
                    self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = self._body(headers, is_kept=target.startswith("/keep/"))
                self._send(method, self._sink.answer(method, target, headers, body))

    def _head(self) -> bytes | None:
        while (end := self._read.find(b"\r\n\r\n")) < 0:
            data = self._socket.recv(65536)
            if not data:
                return None
            self._read += data
        head = bytes(self._read[:end])
        del self._read[: end + 4]
        return head

    def _body(self, headers: _Headers, *, is_kept: bool) -> _Object:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            raise ValueError("a chunked request: give the client a length")
        size = int(headers.get("content-length", 0))
        data = bytearray(size) if is_kept or size <= _MEBIBYTE else None
        have = min(size, len(self._read))
        if data is not None:
            data[:have] = self._read[:have]
        del self._read[:have]
        while have < size:
            if data is not None:
                count = self._socket.recv_into(memoryview(data)[have:])
            else:
                # The kernel drops these bytes without copying them.
                count = self._socket.recv_into(
                    self._block, min(size - have, _MEBIBYTE), socket.MSG_TRUNC
                )
            if not count:
                raise ConnectionError("the client broke off")
            have += count
        return _Object(size, data)

    def _send(self, method: str, answer: _Answer) -> None:
        length = len(answer.body) if answer.length is None else answer.length
        headers = {**answer.headers, "Content-Length": str(length), "x-amz-request-id": "sink"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._socket.sendall(f"HTTP/1.1 {answer.status}\r\n{lines}\r\n".encode())
        if method != "HEAD" and answer.body:
            self._socket.sendall(answer.body)


def _serve(sink: _Sink, connection: socket.socket, context: ssl.SSLContext | None) -> None:
    with suppress(OSError):  # killed clients are part of a measurement
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        _Connection(sink, connection).serve()


def _listen(sink: _Sink, server: socket.socket, context: ssl.SSLContext | None) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve, args=(sink, connection, context), daemon=True).start()


def _main(certificate: Path | None) -> None:
    sink = _Sink()
    servers: list[tuple[socket.socket, ssl.SSLContext | None]] = [
        (socket.create_server(("127.0.0.1", 0), backlog=128), None)
    ]
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_name("key.pem"))
        servers.append((socket.create_server(("127.0.0.1", 0), backlog=128), context))
    for server, its in servers:
        threading.Thread(target=_listen, args=(sink, server, its), daemon=True).start()
    print(*(server.getsockname()[1] for server, _ in servers), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _main(Path(sys.argv[1]) if sys.argv[1:] else None)
