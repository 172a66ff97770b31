"""Which checkpoints are kept: the newest, every Nth, the best, and the stages' ends they need.

One that may hold half of a save never takes the place of the newest that does not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contract.grammar import Span, parse_kept
from training.errors import UserError
from training.record.checkpoint_entry import CheckpointEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What to keep besides each stage's best; others are deleted after they leave the head."""

    newest: int = 3
    every: Span | None = None

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise UserError(f"{self.newest} checkpoints cannot be kept; keep 1 or more")

    def kept(self, checkpoints: Sequence[CheckpointEntry]) -> tuple[CheckpointEntry, ...]:
        """The checkpoints to keep; both sequences are oldest first."""
        # A stage's later best is better: it was compared with the earlier one.
        best = {entry.stage: entry for entry in checkpoints if entry.is_best}
        firm = [entry for entry in checkpoints if not entry.is_tentative]
        newest = [*checkpoints[-self.newest :], *firm[-1:]]
        chosen = [*newest, *best.values(), *self._every(checkpoints)]
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
            is_epochs = self.every.unit == "epochs"
            number = (entry.epoch if is_epochs else entry.step) // self.every.value
            key = (entry.stage if is_epochs else "", number)
            if number > 0 and key not in seen:
                seen.add(key)
                yield entry


KEEP_NEWEST = Retention()


def parse_retention(text: str) -> Retention:
    """Read `3` or `3,10epochs`: the newest, and the first of every so many epochs or steps."""
    newest, every = parse_kept(text)
    return Retention(newest=newest, every=every)
