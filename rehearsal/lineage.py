"""Read what a run published (head, events, metrics) and hold it to the lineage promise.

The lineage of a run is its optimizer steps, repeated ones counted once, the newest generation
winning. This module reads the S3 layout of DESIGN.md and knows nothing of the training code.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Files(Protocol):
    """The two things that are needed of a run's store."""

    def names(self, prefix: str) -> Sequence[str]:
        """Names below the run that start with the prefix, sorted."""

    def read(self, name: str) -> bytes | None:
        """The content of one name, or None where it does not exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The steps of a run, each once, and the generations that computed them."""

    steps: dict[int, dict[str, Any]]
    generations: tuple[int, ...]

    def losses(self) -> list[float]:
        """The loss of every step in order."""
        return [self.steps[step]["loss"] for step in sorted(self.steps)]

    def problems(self) -> list[str]:
        """What breaks the promise: a missing step, or a sample not exactly once in an epoch."""
        found = []
        if self.steps and sorted(self.steps) != list(range(1, max(self.steps) + 1)):
            missing = sorted(set(range(1, max(self.steps) + 1)) - set(self.steps))
            found.append(f"steps missing from the lineage: {missing[:10]}")
        by_stage: dict[str, dict[int, Counter[int]]] = {}
        for record in self.steps.values():
            epochs = by_stage.setdefault(record["stage"], {})
            epochs.setdefault(record["epoch"], Counter()).update(record["ids"])
        for stage, epochs in by_stage.items():
            everything = set().union(*epochs.values())
            for epoch, counts in sorted(epochs.items()):
                repeated = sorted(index for index, count in counts.items() if count != 1)
                lost = sorted(everything - set(counts))
                if repeated or lost:
                    found.append(
                        f"stage {stage}, epoch {epoch}: {len(repeated)} samples more than once "
                        f"{repeated[:5]}, {len(lost)} not at all {lost[:5]}"
                    )
        return found


def read_lineage(files: Files) -> Lineage:
    """Merge every attempt's step records; the newest generation wins."""
    records = [line for line in read_metrics(files) if line["kind"] == "step"]
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        known = steps.get(record["step"])
        if known is None or record["generation"] >= known["generation"]:
            steps[record["step"]] = record
    return Lineage(
        steps=steps,
        generations=tuple(sorted({record["generation"] for record in records})),
    )


def read_metrics(files: Files) -> Iterable[dict[str, Any]]:
    """Every metrics line of a run, attempt by attempt in the order of writing."""
    for name in files.names("metrics/"):
        for line in (files.read(name) or b"").decode().splitlines():
            yield json.loads(line)


def read_events(files: Files) -> list[dict[str, Any]]:
    """Every event of a run in the order of time."""
    events = [json.loads(files.read(name) or b"{}") for name in files.names("events/")]
    return sorted(events, key=lambda event: str(event.get("time")))


def read_json(files: Files, name: str) -> dict[str, Any] | None:
    """One JSON object of the run, or None where it does not exist yet."""
    content = files.read(name)
    return None if content is None else json.loads(content)
