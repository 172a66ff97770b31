"""What a finished run of a program shows, and where two of them differ."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.lineage import Line, generation_of
from training.program.progress import LOSSES


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRun:
    """A finished run of the program: its losses by step, its files, its interruptions."""

    losses: Mapping[int, float]
    files: Mapping[str, str]  # final/ name -> sha256
    interruptions: Sequence[Mapping[str, Any]]
    seconds: float
    num_snapshots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where two runs differ."""

    steps: tuple[int, ...]  # with another loss; without files, a last one of one run too
    missing: tuple[int, ...]  # with a loss in one run only: a killed machine told of it too late
    largest: float  # of the losses' differences
    files: tuple[str, ...]

    @property
    def is_none(self) -> bool:
        """Whether the runs are equal bit for bit, as far as the program shows."""
        return not self.steps and not self.files


def losses_by_step(lines: Iterable[Line]) -> dict[int, float]:
    """The loss of each step as the newest attempt that did it has first reported it."""
    losses: dict[int, float] = {}
    generations: dict[int, int] = {}
    told = [line for line in lines if line["kind"] == "metrics" and line["at"] is not None]
    for line in sorted(told, key=generation_of):
        name = next((name for name in LOSSES if name in line["values"]), None)
        if name is not None and generations.get(line["at"]) != generation_of(line):
            generations[line["at"]] = generation_of(line)
            value = line["values"][name]
            losses[line["at"]] = math.nan if value is None else value
    return dict(sorted(losses.items()))


def difference(ours: ProgramRun, theirs: ProgramRun) -> Difference:
    """Compare losses step by step, NaN equal to NaN, and final files by checksum."""
    steps, largest = [], 0.0
    for step in sorted(ours.losses.keys() & theirs.losses.keys()):
        a, b = ours.losses[step], theirs.losses[step]
        if a != b and not (math.isnan(a) and math.isnan(b)):
            steps.append(step)
            if math.isfinite(a - b):
                largest = max(largest, abs(a - b))
    missing = tuple(sorted(ours.losses.keys() ^ theirs.losses.keys()))
    ends = {max(run.losses, default=0) for run in (ours, theirs)}
    if len(ends) > 1 and not ours.files:  # then nothing else shows the end
        steps.append(max(ends))
    names = sorted(ours.files.keys() | theirs.files.keys())
    files = tuple(name for name in names if ours.files.get(name) != theirs.files.get(name))
    return Difference(steps=tuple(steps), missing=missing, largest=largest, files=files)
