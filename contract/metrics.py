"""A run's metrics objects: their names, and a reader that yields each of their lines once.

An attempt writes small objects, numbered from 1: <generation>-<nonce>-<number>.jsonl. Consecutive
ones are merged into <generation>-<nonce>-<first>-<last>-<lines>.jsonl.gz, with a blank line between
the former objects, and only then deleted: for a while, or forever after a kill, a line is in both.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from contract.keys import METRICS

_NAME = re.compile(
    rf"{METRICS}(?P<writer>(?P<generation>[0-9]+)-[^-/]+)-(?P<first>[0-9]+)"
    r"(\.jsonl|-(?P<last>[0-9]+)-(?P<lines>[0-9]+)\.jsonl\.gz)"
)
# What SageMaker looks for in the lines that the trainer prints, by regular expression.
METRIC_DEFINITIONS = {
    "loss": r" loss ([-+.\de]+|nan|inf) lr ",
    "learning_rate": r" lr ([-+.\de]+) ",
    "samples_per_second": r" (\d+) samples/s",
    "percent_waiting_for_data": r", (\d+)% waiting for data",
    "committed_step": r"\[checkpoint\] step (\d+), ",
}
# The fields that every reader relies on, by the line's kind.
_FIELDS: dict[str, dict[str, type]] = {
    "step": {"step": int, "stage": str},
    "evaluation": {"step": int, "stage": str, "metrics": dict},
    "resume": {"step": int},
}


@dataclass(frozen=True, kw_only=True)
class MetricsObject:
    """One object, described by its name: which numbers of which writer it holds."""

    key: str
    writer: str
    generation: int
    first: int
    last: int
    num_lines: int | None  # known of merged objects only

    @property
    def is_merged(self) -> bool:
        """Whether it was merged from several and compressed."""
        return self.num_lines is not None


def metrics_objects(keys: Iterable[str]) -> list[MetricsObject]:
    """Return the metrics objects among keys in writing order, merged ones before their parts."""
    found = []
    for match in filter(None, map(_NAME.fullmatch, set(keys))):
        first, lines = int(match["first"]), match["lines"]
        found.append(
            MetricsObject(
                key=match[0],
                writer=match["writer"],
                generation=int(match["generation"]),
                first=first,
                last=int(match["last"] or first),
                num_lines=int(lines) if lines else None,
            )
        )
    return sorted(found, key=lambda one: (one.generation, one.writer, one.first, -one.last))


def small_key(writer: str, number: int) -> str:
    """Return the key of the `number`th object that an attempt writes."""
    return f"{METRICS}{writer}-{number:05d}.jsonl"


def merge(objects: Sequence[MetricsObject], contents: Sequence[bytes]) -> tuple[str, bytes]:
    """Return key and content of one object that replaces these consecutive ones."""
    parts = [[line for line in content.splitlines() if line] for content in contents]
    span = f"{objects[0].first:05d}-{objects[-1].last:05d}-{sum(map(len, parts))}"
    text = b"\n\n".join(b"\n".join(lines) for lines in parts)
    return f"{METRICS}{objects[0].writer}-{span}.jsonl.gz", gzip.compress(text, mtime=0)


class LineReader:
    """Reads each line of a run once, attempt by attempt, while lines are written and merged.

    `names()` lists the keys below metrics/; `read(keys)` yields their contents in order, None for
    one that does not exist. Damaged objects and lines are skipped and named in `passed_over`.
    """

    def __init__(
        self,
        names: Callable[[], Iterable[str]],
        read: Callable[[Sequence[str]], Iterable[bytes | None]],
    ) -> None:
        self.passed_over: list[str] = []
        self._names = names
        self._read = read
        self._done: dict[str, int] = {}  # writer -> the last number read
        self._gone: set[str] = set()

    def new(self, *, is_last: bool = True) -> Iterator[dict[str, Any]]:
        """Yield the lines not read yet; before the last call, none after a missing number.

        An object that is gone when it is read has been merged since it was listed.
        """
        is_complete = False
        while not is_complete:
            is_complete = True
            plan = self._plan(is_last)
            for found, data in zip(plan, self._read([found.key for found in plan]), strict=True):
                if data is not None:
                    yield from self._lines(found, data)
                elif found.key not in self._gone:
                    self._gone.add(found.key)
                    is_complete = False
                    break
                self._done[found.writer] = found.last

    def _plan(self, is_last: bool) -> list[MetricsObject]:
        # Listed twice: one listing may pass a merged object's name before it exists and reach its
        # parts' names after they were deleted.
        plan, done = [], dict(self._done)
        for found in metrics_objects([*self._names(), *self._names()]):
            read = done.get(found.writer, 0)
            if found.last > read and (is_last or found.first <= read + 1):
                done[found.writer] = found.last
                plan.append(found)
        return plan

    def _lines(self, found: MetricsObject, data: bytes) -> Iterator[dict[str, Any]]:
        parts = [data]
        if found.is_merged:
            try:
                parts = gzip.decompress(data).split(b"\n\n")
                if len(parts) != found.last + 1 - found.first:
                    raise EOFError(f"it has {len(parts)} parts")
            except (OSError, EOFError, zlib.error) as error:
                self.passed_over.append(
                    f"{found.key}: damaged ({error}), with its {found.num_lines} lines"
                )
                return
        num_damaged = 0
        for part in parts[max(0, self._done.get(found.writer, 0) + 1 - found.first) :]:
            for line in part.splitlines():
                record = _parsed(line)
                if record is None:
                    num_damaged += 1
                else:
                    yield record
        if num_damaged:
            lines = "1 damaged line" if num_damaged == 1 else f"{num_damaged} damaged lines"
            self.passed_over.append(f"{found.key}: {lines}")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    fields = {"generation": int, **_FIELDS.get(record["kind"], {})}
    is_whole = all(isinstance(record.get(name), kind) for name, kind in fields.items())
    return record if is_whole else None
