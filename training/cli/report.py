"""`python -m training report`: what has happened to a run, or to those of a sweep, for people."""

import argparse
import json
from pathlib import Path

from contract.errors import Exit
from contract.keys import REPORT
from training.cli.run import RUN_URI, checked_file, positive
from training.durable import OpenRun, SweptRuns, write_report


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    parser.description = (
        "Write a run's report.html: loss curves, evaluations, attempts, cost of interruptions. "
        "Every run writes it at its end; this writes it at any time, and copies it to --out. For a "
        "sweep (its --runs-uri): curves over its runs, hyperparameters against results."
    )
    parser.add_argument("--run-uri", required=True, help=RUN_URI)
    parser.add_argument("--out", type=Path, help="also write the page to this file")
    parser.add_argument(
        "--usd-per-hour", type=positive, help="price of the machine, to show costs in dollars"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(act=_report)


def _report(options: argparse.Namespace) -> int:
    if (sweep := SweptRuns.at(options.run_uri)) is not None:
        verdict = sweep.write_report()
        if options.out is not None:
            sweep.store.get_file(REPORT, checked_file(options.out))
        rows = [each.row() for each in sweep.runs]
        print(json.dumps(rows, indent=1) if options.json else verdict)
        return Exit.FINISHED
    run = OpenRun.at(options.run_uri)
    store, head = run.store, run.head
    if options.out is not None:
        checked_file(options.out)
    history, summary = write_report(store, run.record, head, options.usd_per_hour)
    if options.out is not None:
        store.get_file(REPORT, options.out)
    if options.json:
        found = {
            "state": head.state,
            "steps": len(history.steps),
            "attempts": len(history.attempts),
            "steps_repeated": sum(a.num_repeated for a in history.attempts),
            "repeated_seconds": round(history.repeated_seconds, 3),
            "gap_seconds": round(sum(history.gaps()), 3),
            "passed_over": list(history.passed_over),
            "report": f"{store.uri}/{REPORT}",
        }
        print(json.dumps(found, indent=1))
    else:
        print(summary)
        print(f"[ok] {options.out or f'{store.uri}/{REPORT}'}")
    return Exit.FINISHED
