"""What a run left, as its rules read it: head, config, metrics, events, ledger (verify.py).

Read from a folder or a prefix, with the past versions of a bucket that keeps them, or made in
memory. Times are the store's, in seconds since 1970; of a machine's own the order alone counts.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from contract.keys import CHECKPOINTS, CONFIG, EVENTS, GUARD, HEAD, METRICS
from contract.lineage import Line
from contract.metrics import LineReader, metrics_objects

_READERS = 16
# What the rules read of past heads, of which a run has 10,000 a day.
_OF_HEAD = ("checkpoints", "generation", "name", "nonce", "state", "writer")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTrace:
    """A run's record."""

    head: Line  # empty before the first attempt
    config: Line = field(default_factory=dict)
    ledger: Line = field(default_factory=dict)
    lines: Sequence[Line] = ()  # of the metrics, attempt by attempt
    writers: frozenset[tuple[int, str]] = frozenset()  # of metrics, with their generations
    events: Sequence[Line] = ()  # by the machines' times; `stored` is when the store had it
    sizes: Mapping[str, int] | None = None  # below checkpoints/, where known
    heads: Sequence[tuple[float, Line]] = ()  # since when each was the head; none: not kept
    deleted: Mapping[str, float] = field(default_factory=dict)  # a checkpoint's first deletion
    damaged: Sequence[str] = ()

    @classmethod
    def read(
        cls,
        sizes: Callable[[str], Mapping[str, int]],
        read: Callable[[Sequence[str]], Iterable[bytes | None]],
    ) -> "RunTrace":
        """Read a run; `sizes` lists a prefix, `read` yields contents, None for what is gone."""
        metrics, records = LineReader(lambda: sizes(METRICS), read), dict[str, dict[str, Any]]()
        keys, lines = (HEAD, CONFIG, GUARD, *sorted(sizes(EVENTS))), list(metrics.new())
        damaged = metrics.passed_over
        for key, data in zip(keys, read(keys), strict=True):
            if found := _record(data or b"{}"):
                records[key] = found
            elif found is None:
                damaged.append(f"{key}: damaged")
        events = [{**each, "key": key} for key, each in records.items() if key.startswith(EVENTS)]
        return cls(
            head=records.get(HEAD, {}),
            config=records.get(CONFIG, {}),
            ledger=records.get(GUARD, {}),
            lines=lines,
            writers=frozenset((o.generation, o.writer) for o in metrics_objects(sizes(METRICS))),
            events=sorted(events, key=lambda event: str(event.get("time"))),
            sizes=sizes(CHECKPOINTS),
            damaged=damaged,
        )

    def with_past(self, client: Any, bucket: str, prefix: str) -> "RunTrace":
        """Add what S3 remembers of a versioned bucket, read with boto3's client."""
        pages = client.get_paginator("list_object_versions").paginate(
            Bucket=bucket, Prefix=f"{prefix}/"
        )
        heads, stored, deleted = [], dict[str, float](), dict[str, float]()
        for each in (v for p in pages for k in ("Versions", "DeleteMarkers") for v in p.get(k, ())):
            key, when = each["Key"].removeprefix(f"{prefix}/"), each["LastModified"].timestamp()
            is_deletion, name = "Size" not in each, key.removeprefix(CHECKPOINTS).split("/")[0]
            if key == HEAD and not is_deletion:
                heads.append((when, each["VersionId"]))
            elif key.startswith(CHECKPOINTS) and is_deletion:
                deleted[name] = min(when, deleted.get(name, when))
            stored[key] = when

        def read(version: str) -> dict[str, Any]:
            of = {"Bucket": bucket, "Key": f"{prefix}/{HEAD}", "VersionId": version}
            return _record(client.get_object(**of)["Body"].read(), _OF_HEAD) or {}

        heads.reverse()  # S3 lists the newest first
        with ThreadPoolExecutor(_READERS, thread_name_prefix="get") as pool:
            contents = list(pool.map(read, [version for _, version in heads]))
        past = [(when, head) for (when, _), head in zip(heads, contents, strict=True) if head]
        events = [{**each, "stored": stored.get(each["key"])} for each in self.events]
        return replace(self, heads=past, deleted=deleted, events=events)


def _record(data: bytes, of: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return an object's content, or what it has of these names; None if it is damaged."""

    def named(found: dict[str, Any]) -> dict[str, Any]:
        return {name: found[name] for name in of if name in found}

    try:
        found = json.loads(data, object_hook=named if of else None)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
