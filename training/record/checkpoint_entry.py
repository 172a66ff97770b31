"""A checkpoint as listed in head.json. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["periodic", "best", "emergency", "rebalance", "stage-end"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str  # of its bytes; for several parts, of their concatenated digests
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
    is_best: bool = False  # the best by its stage's best_metric when it was evaluated
