"""The step lines of a run in columns: some 60 bytes a step, however long the run.

No numpy: the command that marks a run failed writes a receipt under whatever interpreter there is.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from contract.lineage import Line

_INTEGERS = ("step", "stage_step", "generation", "stage")
_NUMBERS = ("loss", "seconds", "gradient_norm")
_NAN = float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Steps, ordered by their number; each column has one value per step."""

    columns: Mapping[str, "array[Any]"]
    stages: tuple[str, ...]  # of which the column `stage` has the index

    def __len__(self) -> int:
        return len(self["step"])

    def __getitem__(self, name: str) -> "array[Any]":
        return self.columns[name]

    def take(self, rows: Iterable[int]) -> "Steps":
        """The steps in these rows."""
        kept = array("q", rows)
        columns = {
            name: array(column.typecode, map(column.__getitem__, kept))
            for name, column in self.columns.items()
        }
        return Steps(columns=columns, stages=self.stages)

    def by_stage(self) -> "dict[str, Steps]":
        """Stage -> its steps."""
        rows: dict[int, array[int]] = {}
        for row, stage in enumerate(self["stage"]):
            rows.setdefault(stage, array("q")).append(row)
        return {self.stages[stage]: self.take(kept) for stage, kept in rows.items()}


@dataclass(kw_only=True, slots=True)
class AttemptSteps:
    """What one attempt computed."""

    first: int
    last: int
    num_repeated: int = 0  # of which only a later line counts
    repeated_seconds: float = 0.0


class StepLines:
    """Collects step lines, generation by generation; of a step the last line counts."""

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {
            **{name: array("q") for name in _INTEGERS},
            **{name: array("d") for name in _NUMBERS},
        }
        self._stages: dict[str, int] = {}

    def add(self, line: Line) -> None:
        """Add one; a number that is missing is NaN. OverflowError for a step of no run."""
        rate, count = _number(line.get("samples_per_second")), _number(line.get("num_samples"))
        stage = self._stages.setdefault(line["stage"], len(self._stages))
        row = line["step"], line.get("stage_step", line["step"]), line["generation"], stage
        # A program's lines know no samples.
        told = line.get("seconds")
        seconds = _number(told) if told is not None else count / rate if rate else _NAN
        numbers = _number(line.get("loss")), seconds, _number(line.get("gradient_norm"))
        # All or none: the columns must stay equally long.
        values = (*array("q", row), *numbers)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def split(self) -> tuple[Steps, dict[int, AttemptSteps]]:
        """The lineage, and generation -> what it computed."""
        lines = Steps(columns=self._columns, stages=tuple(self._stages))
        attempts: dict[int, AttemptSteps] = {}
        for generation, step in zip(lines["generation"], lines["step"], strict=True):
            own = attempts.setdefault(generation, AttemptSteps(first=step, last=step))
            own.first, own.last = min(own.first, step), max(own.last, step)
        kept = array("q")
        for row, is_last in _by_step(lines["step"]):
            if is_last:
                kept.append(row)
                continue
            own, seconds = attempts[lines["generation"][row]], lines["seconds"][row]
            own.num_repeated += 1
            own.repeated_seconds += 0.0 if seconds != seconds else seconds
        return lines.take(kept), attempts


def _by_step(steps: "array[Any]") -> Iterator[tuple[int, bool]]:
    """Rows in the order of their steps, and whether each is the last one of its step."""
    rows = sorted(range(len(steps)), key=steps.__getitem__)
    for row, following in zip_longest(rows, rows[1:]):
        yield row, following is None or steps[row] != steps[following]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else _NAN
