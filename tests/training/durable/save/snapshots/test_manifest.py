"""snapshot.json comes back as it was, and none that is damaged or hostile is believed."""

import json
import os
from typing import Any

import pytest

from training.durable.attempt.resume_point import DamagedCheckpointError
from training.durable.save.snapshots.snapshot import (
    Content,
    FolderManifest,
    SavedFile,
    SavedFolder,
    SavedLink,
)

BLOB = "g0001-0123456789abcdef"
CONTENT = Content(bytes=3, sha256="a" * 64, part_bytes=8, blob=BLOB, start=4)


def snapshot() -> FolderManifest:
    name = os.fsdecode(b"d/no text \xff\n")
    return FolderManifest(
        reason="commit",
        program_says_when=True,
        files=(SavedFile(path=name, mode=0o644, mtime_ns=-1, content=CONTENT),),
        links=(SavedLink(path="d/link", target="/anywhere"),),
        folders=(SavedFolder(path="d", mode=0o755, mtime_ns=5),),
        blobs={BLOB: 7},
        note={"step": 3},
    )


def test_it_comes_back_with_names_that_are_no_text() -> None:
    assert FolderManifest.from_bytes(snapshot().to_bytes()) == snapshot()


HOSTILE: list[tuple[str, str, Any]] = [
    ("files", "path", "../outside"),
    ("files", "path", "/etc/passwd"),
    ("files", "path", "d/../../x"),
    ("files", "path", "d//x"),
    ("files", "path", "d/./x"),
    ("files", "path", ""),
    ("files", "path", "d/x\0y"),
    ("files", "path", "d/link/x"),  # through a link
    ("files", "path", "other/x"),  # in a folder that is not there
    ("files", "path", "d/link"),  # twice
    ("files", "path", "d"),
    ("links", "path", "../link"),
    ("links", "target", ""),
    ("links", "target", [1]),
    ("files", "mode", None),
    ("files", "mtime_ns", 1 << 63),
    ("folders", "mode", 1.5),
    ("folders", "path", ".."),
]


@pytest.mark.parametrize(("kind", "field", "value"), HOSTILE)
def test_fails_for_a_path_that_leaves_the_folder_or_no_file_can_have(
    kind: str, field: str, value: object
) -> None:
    record = json.loads(snapshot().to_bytes())
    record[kind][0][field] = value
    with pytest.raises(DamagedCheckpointError, match=r"snapshot\.json was not written by a mirror"):
        FolderManifest.from_bytes(json.dumps(record).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blob", "../head.json"),
        ("blob", "g0001-ffffffffffffffff"),
        ("start", 5),
        ("start", -1),
        ("bytes", -1),
        ("bytes", 1 << 60),
        ("part_bytes", 0),
        ("part_bytes", 1.5),
        ("bytes", True),
        ("sha256", "x"),
        ("blob", None),
        ("extents", []),
        ("extents", [[0, 1], [9, 0], "x"]),
        ("extents", [[9, 0]]),
        ("extents", [[5, 3], [4, 0]]),
        ("extents", [[-1, 3], [9, 0]]),
        ("extents", [[0, 8], [9, -5], [20, 0]]),
        ("extents", [[0, None], [9, 0]]),
    ],
)
def test_fails_for_a_content_that_cannot_be(field: str, value: object) -> None:
    record = json.loads(snapshot().to_bytes())
    record["files"][0]["content"][field] = value
    with pytest.raises(DamagedCheckpointError):
        FolderManifest.from_bytes(json.dumps(record).encode())


def test_fails_for_more_parts_than_anybody_writes() -> None:
    with pytest.raises(ValueError, match="more than 10000 parts"):
        Content(bytes=10_001, sha256="a" * 64, part_bytes=1, blob=BLOB)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": 2}', b"\xff"])
def test_fails_for_what_is_no_snapshot(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        FolderManifest.from_bytes(data)
