"""`python -m training reopen`: take a failed run back, or resume one from a chosen checkpoint.

Imports no torch.
"""

import argparse
import json
import socket

from contract.keys import RECEIPT
from training.cli.run_options import count, positive
from training.errors import EXIT_FINISHED
from training.record.events import Events
from training.record.reopen import Reopened, reopen_run
from training.store.open import open_store


def add_reopen(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reopen`."""
    parser.description = (
        "Take a failed run back: the next `run` with the same options resumes it. With "
        "--from-checkpoint it resumes from that checkpoint; later ones leave the head at once, and "
        "the next attempt deletes their files. With --from-scratch it begins at step 0, and the "
        "checkpoints stay until it has more of its own than are kept. That choice belongs to this "
        "command and not to `run`: a replacement machine runs the same `run` again, and would go "
        "back again. A finished run, and one whose writer is alive, are refused."
    )
    add = parser.add_argument
    add("--run-uri", required=True, help="s3://bucket/runs/<run id>, or a folder")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--from-checkpoint", type=count, metavar="STEP", help="resume from this step's checkpoint"
    )
    start.add_argument("--from-scratch", action="store_true", help="resume from no checkpoint")
    add("--reason", default="", metavar="TEXT", help="why, for the run's events")
    add("--writer", default=socket.gethostname(), help="who says so, for the run's events")
    add(
        "--lease-ttl-seconds",
        type=positive,
        default=30.0,
        help="a writer that shows no heartbeat for this long is gone (default: %(default)s)",
    )
    add("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(act=_reopen)


def _reopen(options: argparse.Namespace) -> int:
    store = open_store(options.run_uri)

    def waiting(writer: str) -> None:
        if not options.json:
            seconds = options.lease_ttl_seconds
            print(f"[lease] held by {writer}; watching its heartbeat for {seconds:g} s", flush=True)

    done = reopen_run(
        store,
        options.from_checkpoint,
        options.lease_ttl_seconds,
        waiting,
        from_scratch=options.from_scratch,
    )
    about = {
        "was": done.before.state,
        "checkpoint": done.newest.name if done.newest else None,
        "step": done.newest.step if done.newest else 0,
        "dropped": done.dropped,
    }
    store.delete([RECEIPT])  # of the failure: the run goes on
    Events(store, options.writer).emit(
        "reopened", "ok", reason=options.reason, failed_because=done.before.reason, **about
    )
    if options.json:
        print(json.dumps({"run": store.uri, "state": done.after.state, **about}, indent=1))
    else:
        print(_sentence(store.uri, done))
    return EXIT_FINISHED


def _sentence(uri: str, done: Reopened) -> str:
    left = len(done.after.checkpoints) if done.newest is None else 0
    why = f"{left} checkpoints are left behind" if left else "it has no checkpoint"
    newest = f"step {done.newest.step}" if done.newest else f"its beginning: {why}"
    text = f"[ok] {uri} was {done.before.state}; its next attempt resumes from {newest}"
    return text + (f", without {', '.join(done.dropped)}" if done.dropped else "")
