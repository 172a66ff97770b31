"""snapshot.json: what a folder held, and where in the store the contents lie.

Whoever can write the store could put any path into it, so a path that leaves the folder, or passes
through a link, is refused before anything is written.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from contract.keys import BLOB_NAME
from training.record.run import DamagedCheckpointError
from training.save.sparse import Extents
from training.store.transfer import MAX_PARTS, num_parts

SNAPSHOT = "snapshot.json"
_FORMAT = 1
# Larger files are objects of their own.
SMALL_BYTES = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")

# Why it was taken: the program asked, the folder was quiet, a notice came, the program ended; or it
# was stopped for it, and what it holds is what a crash would have left.
Reason: TypeAlias = Literal["commit", "quiet", "notice", "exit", "crash-consistent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The bytes of one or more files, and where they lie; `blob` is None for no bytes."""

    bytes: int
    sha256: str  # of its bytes; for several parts, of their concatenated digests
    part_bytes: int
    blob: str | None
    start: int = 0
    extents: Extents | None = None  # of a file with holes: where in it the bytes lie

    def __post_init__(self) -> None:
        _refuse_other_than_numbers(self.bytes, self.part_bytes, self.start)
        if self.bytes < 0 or self.start < 0 or self.part_bytes < 1:
            raise ValueError("a size is wrong")
        if num_parts(self.bytes, self.part_bytes) > MAX_PARTS:
            raise ValueError(f"there are more than {MAX_PARTS} parts")
        if not _SHA256.fullmatch(self.sha256) or (self.blob is None and self.bytes):
            raise ValueError("a checksum or blob is missing")
        if self.extents is not None:
            _refuse_other_than_numbers(*(number for pair in self.extents for number in pair))
            self.extents.refuse_wrong(self.bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self.bytes if self.extents is None else self.extents[-1][0]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Content":
        """Read what `asdict` returned."""
        extents = record.get("extents")
        pairs = None if extents is None else Extents((start, count) for start, count in extents)
        return cls(**{**record, "extents": pairs})


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile:
    """One file of a snapshot."""

    path: str
    mode: int
    mtime_ns: int
    content: Content

    def __post_init__(self) -> None:
        _refuse_other_than_numbers(self.mode, self.mtime_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFolder:
    """One folder of a snapshot."""

    path: str
    mode: int
    mtime_ns: int

    def __post_init__(self) -> None:
        _refuse_other_than_numbers(self.mode, self.mtime_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedLink:
    """One symbolic link; what it points to need not be a part of the snapshot."""

    path: str
    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderManifest:
    """A folder at one moment: what a snapshot.json holds."""

    reason: Reason
    # Whether the program says when: no other moment counts then.
    program_says_when: bool
    files: tuple[SavedFile, ...]
    links: tuple[SavedLink, ...] = ()
    folders: tuple[SavedFolder, ...] = ()
    blobs: Mapping[str, int] = field(default_factory=dict)  # name -> bytes, all that it needs
    note: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._refuse_foreign_paths()
        for file in self.files:
            content = file.content
            if content.blob is None:
                continue
            if content.start + content.bytes > self.blobs[content.blob]:
                raise ValueError(f"{file.path!r} does not fit into its blob")
        for blob, size in self.blobs.items():
            if not BLOB_NAME.fullmatch(blob) or size < 1:
                raise ValueError(f"the blob {blob!r} was not written by a mirror")
        if self.reason not in get_args(Reason):
            raise ValueError(f"the reason {self.reason!r} is unknown")

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.content.bytes for file in self.files)

    @property
    def contents(self) -> dict[str, Content]:
        """The contents by their checksums."""
        return {file.content.sha256: file.content for file in self.files}

    def holds_no_more_than(self, before: "FolderManifest | None") -> bool:
        """Whether that one, published before it, holds the same."""
        if before is None or (self.program_says_when and not before.program_says_when):
            return False
        if before.reason == "crash-consistent" and self.reason in ("quiet", "notice"):
            return False  # the same is known to be whole now
        mine, others = ((one.files, one.links, one.folders) for one in (self, before))
        return mine == others

    def to_bytes(self) -> bytes:
        """The JSON to store; names that are no text keep their bytes as lone surrogates."""
        record = {"format": _FORMAT, **asdict(self)}
        return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "FolderManifest":
        """Read what `to_bytes` wrote; DamagedCheckpointError for anything else."""
        try:
            record = json.loads(data)
            if record.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            files = [
                SavedFile(**{**file, "content": Content.from_json(file["content"])})
                for file in record.pop("files")
            ]
            links = [SavedLink(**link) for link in record.pop("links")]
            folders = [SavedFolder(**folder) for folder in record.pop("folders")]
            return cls(**record, files=tuple(files), links=tuple(links), folders=tuple(folders))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DamagedCheckpointError(f"{SNAPSHOT} was not written by a mirror: {why}") from None

    def _refuse_foreign_paths(self) -> None:
        folders = {folder.path for folder in self.folders}
        seen: set[str] = set()
        for path in self.paths:
            parts = path.split("/")
            if "\0" in path or {"", ".", ".."} & set(parts):
                raise ValueError(f"the path {path!r} leaves the folder")
            if len(parts) > 1 and path.rpartition("/")[0] not in folders:
                raise ValueError(f"the path {path!r} is in no folder of the snapshot")
            if path in seen:
                raise ValueError(f"the path {path!r} is there twice")
            seen.add(path)
        targets = [link.target for link in self.links]
        if any(not isinstance(one, str) or not one or "\0" in one for one in targets):
            raise ValueError("a link points to nothing")

    @property
    def paths(self) -> Iterator[str]:
        """The paths of files, links and folders."""
        for found in (self.files, self.links, self.folders):
            yield from (one.path for one in found)


def _refuse_other_than_numbers(*values: int) -> None:
    """Raise ValueError for what is not a 64-bit integer, as a file system's are."""
    for value in values:
        if type(value) is not int or abs(value) >= 1 << 63:
            raise ValueError(f"{value!r} is not a 64-bit integer")
