"""Reads what a run published, from a bucket of the embedded AWS or from a folder.

It knows the S3 layout of contract/keys.py but nothing of the training code.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from contract.keys import EVENTS, METRICS
from contract.lineage import Line, newest_by_step
from contract.metrics import LineReader
from contract.trace import RunTrace
from contract.verify import broken_rules


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFiles:
    """A run's files below s3://bucket/prefix."""

    client: Any
    bucket: str
    prefix: str

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return name and bytes of each file below the run whose name starts with the prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/{prefix}"
        )
        found = [item for page in pages for item in page.get("Contents", [])]
        return {item["Key"].removeprefix(f"{self.prefix}/"): item["Size"] for item in found}

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if it does not exist."""
        try:
            response = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")
        except self.client.exceptions.NoSuchKey:
            return None
        content: bytes = response["Body"].read()
        return content

    def rules_broken(self) -> list[str]:
        """Return what the run's record shows as broken (contract/verify.py)."""
        trace = RunTrace.read(self.sizes, partial(map, self.read))
        return broken_rules(trace.with_past(self.client, self.bucket, self.prefix))


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFiles:
    """A run's files in a folder."""

    folder: Path

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return name and bytes of each file below the run whose name starts with the prefix."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in found}
        return {name: size for name, size in sizes.items() if name.startswith(prefix)}

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if it does not exist."""
        path = self.folder / name
        return path.read_bytes() if path.exists() else None

    def rules_broken(self) -> list[str]:
        """Return what the run's record shows as broken (contract/verify.py)."""
        return broken_rules(RunTrace.read(self.sizes, partial(map, self.read)))


Files: TypeAlias = BucketFiles | FolderFiles


def bucket_files(client: Any, uri: str) -> BucketFiles:
    """Return the files below an s3:// URI."""
    parts = urlsplit(uri)
    return BucketFiles(client=client, bucket=parts.netloc, prefix=parts.path.strip("/"))


def read_steps(files: Files) -> dict[int, Line]:
    """Merge every attempt's step records; the newest generation wins."""
    return newest_by_step(read_metrics(files), "step")


def losses(steps: Mapping[int, Line]) -> list[float]:
    """Return the loss of every step in order."""
    return [steps[step]["loss"] for step in sorted(steps)]


def read_metrics(files: Files) -> Iterable[dict[str, Any]]:
    """Return every metrics line of a run, attempt by attempt, in the order written."""
    return LineReader(lambda: files.sizes(METRICS), lambda names: map(files.read, names)).new()


def read_events(files: Files) -> list[dict[str, Any]]:
    """Return every event of a run in order of time."""
    events = [json.loads(files.read(name) or b"{}") for name in sorted(files.sizes(EVENTS))]
    return sorted(events, key=lambda event: str(event.get("time")))


def read_json(files: Files, name: str) -> dict[str, Any] | None:
    """Return one JSON object of the run, or None if it does not exist yet."""
    content = files.read(name)
    return None if content is None else json.loads(content)
