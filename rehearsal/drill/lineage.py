"""Reads what a run published (head, events, metrics) and checks the lineage promise.

It knows the S3 layout of contract/keys.py and nothing of the training code.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from contract.keys import EVENTS, METRICS
from contract.lineage import Line, newest_by_step
from contract.metrics import LineReader
from contract.samples import lineage_problems


class Files(Protocol):
    """The two operations that a run's store must have."""

    def names(self, prefix: str) -> Sequence[str]:
        """List the names below the run that start with the prefix, sorted."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content, None if it does not exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The steps of a run, each once, and the generations that computed them."""

    steps: dict[int, Line]
    generations: tuple[int, ...]

    def losses(self) -> list[float]:
        """Return the loss of every step in order."""
        return [self.steps[step]["loss"] for step in sorted(self.steps)]

    def problems(self) -> list[str]:
        """List breaches of the promise: missing steps, samples not exactly once in an epoch."""
        return lineage_problems(self.steps)


def read_lineage(files: Files) -> Lineage:
    """Merge every attempt's step records; the newest generation wins."""
    records = [line for line in read_metrics(files) if line["kind"] == "step"]
    return Lineage(
        steps=newest_by_step(records, "step"),
        generations=tuple(sorted({record["generation"] for record in records})),
    )


def read_metrics(files: Files) -> Iterable[dict[str, Any]]:
    """Return every metrics line of a run, attempt by attempt, in the order of writing."""
    return LineReader(lambda: files.names(METRICS), lambda names: map(files.read, names)).new()


def read_events(files: Files) -> list[dict[str, Any]]:
    """Return every event of a run in order of time."""
    events = [json.loads(files.read(name) or b"{}") for name in files.names(EVENTS)]
    return sorted(events, key=lambda event: str(event.get("time")))


def read_json(files: Files, name: str) -> dict[str, Any] | None:
    """Return one JSON object of the run, None if it does not exist yet."""
    content = files.read(name)
    return None if content is None else json.loads(content)
