"""Send the spooled events to RUN_URI/events/ with the AWS CLI, in batches, until SIGTERM.

An event leaves the spool only after S3 has it; SIGTERM sends the rest. With --once: send the
spooled ones and exit. Run: python3 -m userdata.send_events [--once]
"""

import fcntl
import os
import sys
from pathlib import Path

from contract.keys import EVENTS
from userdata.events import SPOOL
from userdata.machine import machine_path, send, stop_event

POLL_SECONDS = 0.5
# The AWS CLI takes most of a second to start, so events are sent in batches.
BATCH_SECONDS = 2.0
RETRY_SECONDS = 5.0
SEND_TIMEOUT_SECONDS = 60


def send_events(spool: Path, run_uri: str) -> bool:
    """Send what is in the spool; return False if anything is left."""
    spool.mkdir(parents=True, exist_ok=True)
    with spool.with_name("events.lock").open("w") as lock:
        # The service and a --once call must not send at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(spool.iterdir()):
            return True
        move = ("s3", "mv", "--recursive", "--only-show-errors", str(spool), f"{run_uri}/{EVENTS}")
        return send(f"events not sent, kept in {spool}", *move, timeout=SEND_TIMEOUT_SECONDS)


def main() -> int:
    """Send once, or until the service is stopped."""
    spool, run_uri = machine_path(SPOOL), os.environ["RUN_URI"]
    if "--once" in sys.argv[1:]:
        return 0 if send_events(spool, run_uri) else 1
    stop = stop_event()
    spool.mkdir(parents=True, exist_ok=True)
    while not stop.wait(POLL_SECONDS):
        if any(spool.iterdir()):
            stop.wait(BATCH_SECONDS)
            if not send_events(spool, run_uri):
                stop.wait(RETRY_SECONDS)
    return 0 if send_events(spool, run_uri) else 1


if __name__ == "__main__":
    sys.exit(main())
