"""Leave an event: a JSON file in the spool, which training-events.service sends to S3.

It needs no network and cannot fail a boot. Run:
python3 -m userdata.events NAME ok|failed|info [--since FILE] [--message TEXT] [--place PLACE]
"""

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from userdata.machine import machine_path

SPOOL = "/var/lib/training/events"
Value = str | float | int


def leave_event(name: str, status: str, **fields: Value) -> Path:
    """Write one event to the spool atomically and return its file."""
    now = datetime.now(UTC)
    instance_id = os.environ.get("INSTANCE_ID", "unknown")
    event = {
        "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "instance_id": instance_id,
        "name": name,
        "status": status,
        **fields,
    }
    spool = machine_path(SPOOL)
    spool.mkdir(parents=True, exist_ok=True)
    # Microseconds make the file names of one machine's events sort by time.
    path = spool / f"{now:%Y%m%dT%H%M%S.%fZ}-{instance_id}-{name}.json"
    unfinished = spool.with_name("events-unfinished") / f"{os.getpid()}-{path.name}"
    unfinished.parent.mkdir(exist_ok=True)
    unfinished.write_text(json.dumps(event) + "\n")
    unfinished.rename(path)
    return path


def main() -> int:
    """Leave the event that the command line describes."""
    parser = argparse.ArgumentParser(prog="python3 -m userdata.events")
    parser.add_argument("name")
    parser.add_argument("status", choices=("ok", "failed", "info"))
    parser.add_argument("--since", type=Path, help="record the seconds since this file was written")
    parser.add_argument("--message")
    parser.add_argument("--place", help="where in the run a trainer failed")
    arguments = parser.parse_args()
    fields: dict[str, Value] = {}
    if arguments.since is not None:
        fields["seconds"] = round(max(0.0, time.time() - arguments.since.stat().st_mtime), 3)
    texts = {"message": arguments.message, "place": arguments.place}
    fields |= {name: text for name, text in texts.items() if text is not None}
    leave_event(arguments.name, arguments.status, **fields)
    return 0


if __name__ == "__main__":
    sys.exit(main())
