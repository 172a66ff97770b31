"""A checkpoint as listed in head.json; a name or number that no writer wrote is refused.

Names become the keys that are read and deleted. Imports no torch.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from contract.keys import CHECKPOINT_NAME

Kind: TypeAlias = Literal["periodic", "best", "emergency", "rebalance", "stage-end"]

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str  # of its bytes; for several parts, of their concatenated digests
    part_bytes: int | None = None  # None: one part

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "FileEntry":
        """Read what `asdict` returned; ValueError or TypeError for anything else."""
        if not _FILE_NAME.fullmatch(record["name"]):
            raise ValueError(f"the file name {record['name']!r} was not written by a trainer")
        part_bytes = record.get("part_bytes")
        if record["bytes"] < 0 or (part_bytes is not None and part_bytes < 1):
            raise ValueError(f"{record['name']} has a wrong number of bytes")
        return cls(**record)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One committed checkpoint. `step` counts over all Train stages of the run, so names sort."""

    name: str
    step: int
    stage: str
    epoch: int
    kind: Kind
    files: tuple[FileEntry, ...]
    is_best: bool = False  # the best by its stage's best_metric when it was evaluated
    # What its stage still needed by the pace of its writer, for the Guard; None: not known yet.
    seconds_left: float | None = None
    # Taken because a program ended itself after a notice: it may hold half of a save.
    is_tentative: bool = False
    failed_starts: int = 0  # programs that began with it, and failed before they left another

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "CheckpointEntry":
        """Read what `asdict` returned; ValueError or TypeError for anything else."""
        if not CHECKPOINT_NAME.fullmatch(record["name"]):
            raise ValueError(f"the checkpoint name {record['name']!r} was not written by a trainer")
        if record.get("failed_starts", 0) < 0:
            raise ValueError(f"{record['name']} has a wrong number of failed starts")
        if record["step"] < 0 or record["epoch"] < 0 or record["kind"] not in get_args(Kind):
            raise ValueError(f"{record['name']} has a wrong step, epoch or kind")
        files = tuple(FileEntry.from_json(file) for file in record["files"])
        return cls(**{**record, "files": files})


def checkpoint_name(step: int, generation: int) -> str:
    """A unique name that sorts by step."""
    return f"{step:08d}-g{generation:04d}-{secrets.token_hex(8)}"


def step_of(name: str) -> int:
    """The step in a name that `checkpoint_name` made."""
    return int(name.partition("-")[0])
