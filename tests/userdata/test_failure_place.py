"""Where a trainer failed, and whether another machine's failed at the same place."""

import json
from typing import Any

import pytest

from userdata.failure_place import failed_there, place_of

RESUME = {"kind": "resume", "stage": None, "step": 0}
STEP = {"kind": "step", "stage": "head", "step": 7}


@pytest.mark.parametrize(
    ("records", "place"),
    [
        ([], ""),
        ([RESUME], "the run's beginning, after step 0"),
        ([RESUME, STEP, {"kind": "commit", "step": 7}], "stage head after step 7"),
        # The next attempt fails before its first step: that is where it resumed.
        ([STEP, {**RESUME, "stage": "head", "step": 4}], "stage head after step 4"),
        ([RESUME, {"kind": "prepare", "stage": "features", "shard": 9, "done": 3}],
         "stage features after 3 shards"),
    ],
)  # fmt: skip
def test_the_place_is_the_last_attempts_last_stage_and_step(
    records: list[dict[str, Any]], place: str
) -> None:
    lines = [json.dumps(record) for record in records]
    assert place_of([*lines, '{"kind": "st']) == place


def failure(machine: str, **fields: str) -> dict[str, Any]:
    return {"name": "machine-failed", "instance_id": machine, **fields}


def test_only_another_machine_at_the_same_place_since_the_run_was_reopened_counts() -> None:
    reopened = {"name": "reopened", "instance_id": "laptop"}
    there = failure("i-1", place="stage head after step 7")
    boot, elsewhere = failure("i-1"), failure("i-1", place="stage head after step 8")

    def found(*events: dict[str, Any]) -> str | None:
        return failed_there(events, "stage head after step 7", "i-2")

    assert found(there, failure("i-2", place="stage head after step 7")) == "i-1"
    assert found(boot, elsewhere) is None
    assert found(failure("i-2", place="stage head after step 7")) is None
    assert found(there, reopened) is None
    assert found(reopened, there) == "i-1"
