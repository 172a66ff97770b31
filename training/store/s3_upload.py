"""One object of S3 in parts, each retried by itself; S3 verifies the SHA-256 of each.

Only the process that started an upload completes or aborts it; its parts may come from another.
"""

import base64
import io
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from training.store.part_process import PartProcess

_MEBIBYTE = 1024 * 1024

# Calls until it succeeds or fails with a permanent error.
_Repeating: TypeAlias = Callable[[Callable[[], Any]], Any]


class S3Upload:
    """An upload by this process; parts of shared memory are sent by `process`."""

    def __init__(
        self,
        client: Any,
        repeating: _Repeating,
        where: dict[str, str],
        *,
        num_parts: int,
        process: PartProcess,
        abort: Callable[[dict[str, str]], None],
    ) -> None:
        self._process = process
        self._abort = abort
        self._client = client
        self._repeating = repeating
        self._where = where
        self._sums = [""] * num_parts
        self._tags = [""] * num_parts
        if num_parts > 1:
            answer = repeating(
                lambda: client.create_multipart_upload(**where, ChecksumAlgorithm="SHA256")
            )
            self._where = {**where, "UploadId": answer["UploadId"]}

    def put(self, number: int, start: int, data: memoryview, sha256: bytes) -> None:
        """Write part `number` (from 0), which starts at byte `start`."""
        tag = put_part(self._client, self._repeating, self._where, number, data, sha256)
        self._arrived(number, tag, sha256)

    def is_ready(self) -> bool:
        """Whether `put_shared` can send; waits while the process starts."""
        return self._process.is_ready()

    def put_shared(
        self, memory: int, size: int, part_bytes: int, must_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, bytes]]:
        """Have the process send every part; yield number and SHA-256 of each."""
        order = {"where": self._where, "size": size, "part_bytes": part_bytes}
        for number, tag, sha256 in self._process.send(order, memory, must_stop):
            self._arrived(number, tag, sha256)
            yield number, sha256

    def finish(self) -> None:
        """Make the object visible and durable; call it once every part was put."""
        if "UploadId" not in self._where:
            return
        parts = [
            {"PartNumber": number, "ETag": tag, "ChecksumSHA256": checksum}
            for number, (tag, checksum) in enumerate(zip(self._tags, self._sums, strict=True), 1)
        ]
        client = self._client

        def complete() -> None:
            try:
                client.complete_multipart_upload(**self._where, MultipartUpload={"Parts": parts})
            except client.exceptions.NoSuchUpload:
                # Completed by an earlier attempt whose response was lost, or it does not exist.
                client.head_object(Bucket=self._where["Bucket"], Key=self._where["Key"])

        self._repeating(complete)

    def abort(self) -> None:
        """Abort; the bucket's lifecycle rule deletes what is left after a day."""
        if "UploadId" in self._where:
            self._abort(self._where)

    def _arrived(self, number: int, tag: str, sha256: bytes) -> None:
        self._tags[number] = tag
        self._sums[number] = base64.b64encode(sha256).decode()


def put_part(
    client: Any,
    repeating: _Repeating,
    where: dict[str, str],
    number: int,
    data: memoryview,
    sha256: bytes,
) -> str:
    """Send one part, or the whole object if it has no others; return its ETag."""
    checksum = base64.b64encode(sha256).decode()

    def send() -> Any:
        body: Any = Body(data) if len(data) else b""
        if "UploadId" not in where:
            return client.put_object(**where, Body=body, ChecksumSHA256=checksum)
        return client.upload_part(
            **where, PartNumber=number + 1, Body=body, ChecksumSHA256=checksum
        )

    return str(repeating(send)["ETag"])


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
