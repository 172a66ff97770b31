"""Which checkpoints are kept: the newest, every Nth, the best, and the stages' ends they need."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from training.errors import UserError
from training.record.checkpoint_entry import CheckpointEntry

Unit: TypeAlias = Literal["epochs", "steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Every:
    """Keep the first checkpoint of every `value` epochs of a stage, or steps of the run."""

    value: int
    unit: Unit

    def number(self, entry: CheckpointEntry) -> int:
        """How many multiples of `value` the checkpoint has passed."""
        return (entry.epoch if self.unit == "epochs" else entry.step) // self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What to keep besides each stage's best; others are deleted after they leave the head."""

    newest: int = 3
    every: Every | None = None

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise UserError(f"{self.newest} checkpoints cannot be kept; keep 1 or more")

    def kept(self, checkpoints: Sequence[CheckpointEntry]) -> tuple[CheckpointEntry, ...]:
        """The checkpoints to keep; both sequences are oldest first."""
        # A stage's later best is better: it was compared with the earlier one.
        best = {entry.stage: entry for entry in checkpoints if entry.is_best}
        chosen = [*checkpoints[-self.newest :], *best.values(), *self._every(checkpoints)]
        names = {entry.name for entry in chosen}
        for entry in chosen:
            earlier = checkpoints[: checkpoints.index(entry)]
            ends = [e for e in earlier if e.kind == "stage-end" and e.stage != entry.stage]
            names.update(end.name for end in ends[-1:])
        return tuple(entry for entry in checkpoints if entry.name in names)

    def _every(self, checkpoints: Sequence[CheckpointEntry]) -> Iterator[CheckpointEntry]:
        if self.every is None:
            return
        seen: set[tuple[str, int]] = set()
        for entry in checkpoints:
            number = self.every.number(entry)
            key = (entry.stage if self.every.unit == "epochs" else "", number)
            if number > 0 and key not in seen:
                seen.add(key)
                yield entry


KEEP_NEWEST = Retention()


def parse_retention(text: str) -> Retention:
    """Read `3` or `3,10epochs`: the newest, and the first of every so many epochs or steps."""
    match = re.fullmatch(
        r"(?P<newest>[1-9][0-9]*)(,(?P<value>[1-9][0-9]*)(?P<unit>epoch|step)s?)?", text
    )
    if not match:
        raise UserError(
            f"which checkpoints to keep, {text!r}, cannot be read; write 3, 3,10epochs or "
            "3,5000steps: the newest three, and the first of every so many"
        )
    every = None
    if match["unit"]:
        every = Every(value=int(match["value"]), unit=cast(Unit, match["unit"] + "s"))
    return Retention(newest=int(match["newest"]), every=every)
