"""Which checkpoints are kept: the newest, every Nth, the best, and what those began from."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from training.entries import CheckpointEntry
from training.errors import UserError

Mode: TypeAlias = Literal["min", "max"]
Unit: TypeAlias = Literal["epochs", "steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Every:
    """Keep the first checkpoint of every so many epochs of a stage, or steps of the run."""

    value: int
    unit: Unit

    def number(self, entry: CheckpointEntry) -> int:
        """Which multiple the checkpoint has passed."""
        return (entry.epoch if self.unit == "epochs" else entry.step) // self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Keep the best checkpoint of each stage that is evaluated by this metric."""

    metric: str
    mode: Mode

    def is_better(self, one: float, other: float) -> bool:
        """Whether `one` beats `other`; equal values and NaN do not."""
        return one > other if self.mode == "max" else one < other


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What to keep; the rest is deleted once its name has left the head."""

    newest: int = 3
    every: Every | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise UserError(f"{self.newest} checkpoints cannot be kept; keep 1 or more")

    def kept(self, checkpoints: Sequence[CheckpointEntry]) -> tuple[CheckpointEntry, ...]:
        """Of checkpoints, oldest first, those that stay."""
        chosen = [*checkpoints[-self.newest :], *self._every(checkpoints), *self._best(checkpoints)]
        names = {entry.name for entry in chosen}
        for entry in chosen:
            earlier = checkpoints[: checkpoints.index(entry)]
            ends = [e for e in earlier if e.kind == "stage-end" and e.stage != entry.stage]
            names.update(end.name for end in ends[-1:])
        return tuple(entry for entry in checkpoints if entry.name in names)

    def beats(self, entry: CheckpointEntry, checkpoints: Sequence[CheckpointEntry]) -> bool:
        """Whether the entry is the best of its stage."""
        if self.best is None or self.best.metric not in entry.metrics:
            return False
        return entry in self._best([*checkpoints, entry])

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

    def _best(self, checkpoints: Sequence[CheckpointEntry]) -> Sequence[CheckpointEntry]:
        if self.best is None:
            return ()
        found: dict[str, CheckpointEntry] = {}
        for entry in checkpoints:
            value = entry.metrics.get(self.best.metric)
            if value is None or value != value:
                continue
            before = found.get(entry.stage)
            if before is None or self.best.is_better(value, before.metrics[self.best.metric]):
                found[entry.stage] = entry
        return tuple(found.values())


KEEP_NEWEST = Retention()


def parse_every(text: str) -> Every:
    """Read `10epochs` or `5000steps`."""
    match = re.fullmatch(r"(?P<value>[1-9][0-9]*)(?P<unit>epoch|step)s?", text)
    if not match:
        raise UserError(
            f"which checkpoints to keep, {text!r}, cannot be read; write 10epochs or 5000steps"
        )
    return Every(value=int(match["value"]), unit=cast(Unit, match["unit"] + "s"))


def parse_best(text: str) -> Best:
    """Read `max:accuracy` or `min:loss`."""
    mode, separator, metric = text.partition(":")
    if mode not in ("min", "max") or not separator or not metric:
        raise UserError(
            f"the best checkpoint's metric {text!r} cannot be read; write max:accuracy or min:loss"
        )
    return Best(metric=metric, mode=cast(Mode, mode))
