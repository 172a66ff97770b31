"""What head.json says of a checkpoint. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["periodic", "best", "emergency", "rebalance", "stage-end"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str  # of its bytes; where it has several parts, of their sha256 in a row
    part_bytes: int | None = None  # None: one part


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One committed checkpoint. `step` counts over all Train stages of the run, so names sort."""

    name: str
    step: int
    stage: str
    epoch: int
    kind: Kind
    files: tuple[FileEntry, ...]
    is_best: bool = False  # by its stage's best_metric, of all states evaluated until then
