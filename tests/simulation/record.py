"""What a bucket keeps of a run, with its past, as `runs verify` reads it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from contract.keys import CHECKPOINTS, HEAD
from contract.trace import RunTrace
from tests.simulation.bucket import Bucket


def trace_of(bucket: Bucket, prefix: str) -> RunTrace:
    """Return the run's record with its past, as `runs verify` reads it from a bucket."""

    def sizes(below: str) -> dict[str, int]:
        found = bucket.below(prefix + below)
        return {key[len(prefix) :]: len(one.data or b"") for key, one in found}

    def read(keys: Any) -> Iterator[bytes | None]:
        for key in keys:
            one = bucket.found(prefix + key)
            yield one.data if one else None

    found = RunTrace.read(sizes, read)
    heads = [
        (float(int(one.since)), json.loads(one.data))
        for one in bucket.objects.get(prefix + HEAD, ())
        if one.data
    ]
    deleted: dict[str, float] = {}
    for key, versions in bucket.objects.items():
        name = key[len(prefix) :]
        if name.startswith(CHECKPOINTS):
            for one in versions:
                if one.data is None:
                    checkpoint = name[len(CHECKPOINTS) :].partition("/")[0]
                    deleted[checkpoint] = min(one.when, deleted.get(checkpoint, one.when))
    events = [
        {**each, "stored": bucket.objects[prefix + each["key"]][-1].when} for each in found.events
    ]
    return replace(found, heads=heads, deleted=deleted, events=events)
