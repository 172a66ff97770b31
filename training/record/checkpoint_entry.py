"""A checkpoint as listed in head.json, and which ones stay listed.

A name or number that no writer wrote is refused: names become the keys that are read and deleted.
The newest and the furthest stay, every Nth, the best, and the stages' ends they need; one that may
hold half of a save never takes the place of one that does not. Those from before the run started
over stay until there are more of the new ones than are kept. Imports no torch.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from contract.grammar import Span, parse_kept
from contract.keys import CHECKPOINT_NAME
from training.errors import UserError
from training.record.json_record import refuse_other_than_counts

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
        refuse_other_than_counts(record, "bytes")
        if record.get("part_bytes") is not None:
            refuse_other_than_counts(record, "part_bytes")
            if not record["part_bytes"]:
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
    # Taken as a program ended itself after a notice, or stood still: it may hold half of a save.
    is_tentative: bool = False
    failed_starts: int = 0  # programs that began with it, and failed before they left another
    is_left_behind: bool = False  # the run has started over: no attempt resumes from it
    program_step: int | None = None  # what a program had reported when it was taken

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "CheckpointEntry":
        """Read what `asdict` returned; ValueError or TypeError for anything else."""
        if not CHECKPOINT_NAME.fullmatch(record["name"]):
            raise ValueError(f"the checkpoint name {record['name']!r} was not written by a trainer")
        refuse_other_than_counts(record, "step", "epoch", "failed_starts")
        if record.get("program_step") is not None:
            refuse_other_than_counts(record, "program_step")
        if record["kind"] not in get_args(Kind):
            raise ValueError(f"{record['name']} has the unknown kind {record['kind']!r}")
        files = tuple(FileEntry.from_json(file) for file in record["files"])
        return cls(**{**record, "files": files})


def checkpoint_name(step: int, generation: int) -> str:
    """A unique name that sorts by step."""
    return f"{step:08d}-g{generation:04d}-{secrets.token_hex(8)}"


def step_of(name: str) -> int:
    """The step in a name that `checkpoint_name` made."""
    return int(name.partition("-")[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What to keep besides each stage's best; others are deleted after they leave the head."""

    newest: int = 3
    every: Span | None = None

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise UserError(f"{self.newest} checkpoints cannot be kept; keep 1 or more")

    def kept(self, entries: Sequence[CheckpointEntry]) -> tuple[CheckpointEntry, ...]:
        """The checkpoints to keep; both sequences are oldest first."""
        left_behind = [entry for entry in entries if entry.is_left_behind]
        checkpoints = [entry for entry in entries if not entry.is_left_behind]
        # A stage's later best is better: it was compared with the earlier one.
        best = {entry.stage: entry for entry in checkpoints if entry.is_best}
        firm = [entry for entry in checkpoints if not entry.is_tentative]
        newest = [*firm[-self.newest :], *checkpoints[-self.newest :]]
        # Its successor may have been passed over by a machine that could not read it, or be of a
        # program that began again on a torn save without noticing.
        furthest = [*_furthest(firm), *_furthest(checkpoints)]
        chosen = [*newest, *furthest, *best.values(), *self._every(checkpoints)]
        names = {entry.name for entry in chosen}
        if len(firm) <= self.newest:
            names.update(entry.name for entry in left_behind)
        for entry in chosen:
            earlier = checkpoints[: checkpoints.index(entry)]
            ends = [e for e in earlier if e.kind == "stage-end" and e.stage != entry.stage]
            names.update(end.name for end in ends[-1:])
        return tuple(entry for entry in entries if entry.name in names)

    def _every(self, checkpoints: Sequence[CheckpointEntry]) -> Iterator[CheckpointEntry]:
        if self.every is None:
            return
        seen: set[tuple[str, int]] = set()
        for entry in checkpoints:
            is_epochs = self.every.unit == "epochs"
            number = (entry.epoch if is_epochs else entry.step) // self.every.value
            key = (entry.stage if is_epochs else "", number)
            if number > 0 and key not in seen:
                seen.add(key)
                yield entry


def _furthest(checkpoints: Sequence[CheckpointEntry]) -> Sequence[CheckpointEntry]:
    """The last of those with the furthest step: a program's own, if it reports steps."""
    steps = [(entry.program_step, entry) for entry in checkpoints]
    known = [(step, entry) for step, entry in steps if step is not None]
    reached = known or [(entry.step, entry) for entry in checkpoints]
    return [entry for _, entry in sorted(reached, key=lambda one: one[0])[-1:]]


KEEP_NEWEST = Retention()


def parse_retention(text: str) -> Retention:
    """Read `3` or `3,10epochs`: the newest, and the first of every so many epochs or steps."""
    newest, every = parse_kept(text)
    return Retention(newest=newest, every=every)
