"""Say where in the run the trainer failed, and whether another machine's trainer failed there too.

A stage that fails at the same step on two machines would fail on a third. The machine-failed events
are the record: they outlive their machines, and `reopen` makes older ones void. Run:
python3 -m userdata.failure_place [--of-others PLACE]
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from contract.keys import EVENTS
from userdata.machine import machine_path, run_aws

METRICS_FILE = "/var/log/training/metrics.jsonl"
NAMES = ("machine-failed", "reopened")


def place_of(lines: Iterable[str]) -> str:
    """Return the last attempt's last stage with its step or shards; "" before it has resumed."""
    place = ""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["kind"] in ("resume", "step"):
            stage = record["stage"]
            at = f"stage {stage} after step" if stage else "the run's beginning, after step"
            place = f"{at} {record['step']}"
        elif record["kind"] == "prepare":
            place = f"stage {record['stage']} after {record['done']} shards"
    return place


def failed_there(events: Iterable[Mapping[str, Any]], place: str, own_id: str) -> str | None:
    """Return another machine that has failed at `place` since the last `reopened`, if any."""
    found = None
    for event in events:
        if event["name"] == "reopened":
            found = None
        elif event.get("place") == place and event["instance_id"] != own_id:
            found = str(event["instance_id"])
    return found


def read_events(run_uri: str) -> list[dict[str, Any]]:
    """Fetch the events of these names; their keys begin with the time."""
    with tempfile.TemporaryDirectory() as folder:
        includes = [word for name in NAMES for word in ("--include", f"*-{name}.json")]
        copy = ("s3", "cp", "--recursive", "--only-show-errors", "--exclude", "*", *includes)
        if not run_aws(*copy, f"{run_uri}/{EVENTS}", folder):
            raise OSError("see the AWS CLI's message above")
        return [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


def main() -> int:
    """Print this machine's place; with --of-others, the other machine, or exit with status 1."""
    if sys.argv[1:2] != ["--of-others"]:
        path = machine_path(METRICS_FILE)
        print(place_of(path.read_text().splitlines() if path.exists() else []))
        return 0
    try:
        events = read_events(os.environ["RUN_URI"])
    except OSError as error:
        print(f"the events of other machines could not be read: {error}", file=sys.stderr)
        return 1
    other = failed_there(events, sys.argv[2], os.environ["INSTANCE_ID"])
    if other is None:
        return 1
    print(other)
    return 0


if __name__ == "__main__":
    sys.exit(main())
