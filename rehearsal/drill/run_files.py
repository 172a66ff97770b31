"""Reads a run's files where they are: in a bucket of the embedded AWS or in a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFiles:
    """A run's files below s3://bucket/prefix."""

    client: Any
    bucket: str
    prefix: str

    def names(self, prefix: str) -> Sequence[str]:
        """List the names below the run that start with the prefix, sorted."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/{prefix}"
        )
        keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return sorted(key.removeprefix(f"{self.prefix}/") for key in keys)

    def read(self, name: str) -> bytes | None:
        """Return a file's content, None if it does not exist."""
        try:
            response = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")
        except self.client.exceptions.NoSuchKey:
            return None
        content: bytes = response["Body"].read()
        return content


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFiles:
    """A run's files in a folder."""

    folder: Path

    def names(self, prefix: str) -> Sequence[str]:
        """List the names below the run that start with the prefix, sorted."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        names = (path.relative_to(self.folder).as_posix() for path in found)
        return sorted(name for name in names if name.startswith(prefix))

    def read(self, name: str) -> bytes | None:
        """Return a file's content, None if it does not exist."""
        path = self.folder / name
        return path.read_bytes() if path.exists() else None


def bucket_files(client: Any, uri: str) -> BucketFiles:
    """Return the files below an s3:// URI."""
    parts = urlsplit(uri)
    return BucketFiles(client=client, bucket=parts.netloc, prefix=parts.path.strip("/"))
