"""How far an import of text has come: kept in its folder, so that an interrupted one goes on.

It overwrites what it wrote after the position that it had kept.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from training.dataset_output import FolderOutput
from training.errors import UserError
from training.sources import UNFINISHED
from training.workloads.growth.text.tokens import shard_name

# 64 MiB of a vocabulary of up to 65,536 tokens: a sync fetches several files at a time.
_SHARD_TOKENS = 1 << 25


@dataclass(kw_only=True, slots=True)
class SplitCounts:
    """What has been written of a split; bytes are those of its text in UTF-8."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0


@dataclass(kw_only=True, slots=True)
class ImportPosition:
    """How far an import has come: what has been read, and a digest of it."""

    pieces: int = 0
    digest: str = ""
    splits: dict[str, SplitCounts] = field(default_factory=dict)

    @property
    def documents(self) -> int:
        return sum(split.documents for split in self.splits.values())


def kept_position(out: Path, identity: Mapping[str, Any]) -> ImportPosition:
    """Where an interrupted import stopped; UserError if it was another one."""
    path = out / UNFINISHED
    if not path.is_file():
        return ImportPosition()
    kept = json.loads(path.read_bytes())
    changed = [key for key in identity if kept["identity"].get(key) != identity[key]]
    if changed or kept["identity"].keys() != identity.keys():
        what = changed[0] if changed else "source"
        raise UserError(f"{out} has an unfinished dataset with another {what}; give a new folder")
    splits = {name: SplitCounts(**counts) for name, counts in kept["splits"].items()}
    return ImportPosition(pieces=kept["pieces"], digest=kept["digest"], splits=splits)


def keep(out: Path, identity: Mapping[str, Any], position: ImportPosition) -> None:
    """Keep a position, and what is imported."""
    record = {"workload": "growth", "identity": identity, **asdict(position)}
    FolderOutput(out).write(UNFINISHED, json.dumps(record).encode())


def write_tokens(
    out: Path,
    split: str,
    first: int,
    tokens_T: NDArray[Any],
    *,
    shard_tokens: int = _SHARD_TOKENS,
) -> None:
    """Write the split's tokens from number `first` on, and nothing behind them, to the disk."""
    done = 0
    while done < len(tokens_T):
        number, there = divmod(first + done, shard_tokens)
        part = tokens_T[done : done + shard_tokens - there]
        path = out / shard_name(split, number)
        with path.open("r+b" if there else "wb") as file:
            file.seek(there * part.itemsize)
            file.write(part.tobytes())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        done += len(part)
