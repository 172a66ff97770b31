"""Compare a finished run with its plan; --calibrate corrects later plans.

python -m sizing review runs/run-1 --size g5.2xlarge
python -m sizing review runs/run-1 --size g5.2xlarge --calibrate
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from sizing.cli.plan import price_ages
from sizing.cli.tables import print_json, show
from sizing.models.calibration import CALIBRATION_FILE, Entry, add_entry
from sizing.plan.finished_run import read_run
from sizing.plan.run_review import calibration, compare, plan_of, unplanned

HELP = "a finished run beside its plan; calibrates"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("folder", type=Path, help="a run's folder, or its receipt.json")
    parser.add_argument("--size", help="the size it ran on (default: the planned one)")
    parser.add_argument(
        "--calibrate", action="store_true", help="save the measured constants for later plans"
    )
    parser.add_argument(
        "--calibration", type=Path, default=CALIBRATION_FILE, help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print predicted and actual."""
    finished = read_run(arguments.folder)
    size = arguments.size or finished.size
    if size is None:
        raise ValueError(
            f"the receipt of {finished.run_id} does not say what it ran on; give --size"
        )
    plan = plan_of(finished, size)
    rows = compare(finished, plan)
    entry = calibration(finished, plan) if arguments.calibrate else None
    if entry is not None:
        add_entry(entry, arguments.calibration)
    if arguments.json:
        print_json(
            "review",
            {
                "run": finished.run_id,
                "size": size,
                "device": finished.device,
                "rows": [
                    {**asdict(row), "ratio": row.ratio, "verdict": row.verdict} for row in rows
                ],
                "ignored_overrides": unplanned(finished),
                "calibrated": asdict(entry) if entry else None,
            },
        )
        return 0
    origin = "config.json" if finished.prediction else "a plan made now"
    notes = [
        *([f"the plan ignores {', '.join(unplanned(finished))}"] if unplanned(finished) else []),
        f"predicted: {origin}, for {size}; actual: {finished.device}, {finished.state}",
        price_ages([plan]),
        *([_calibrated(entry, arguments.calibration)] if entry else []),
    ]
    show(
        [
            {
                "what": row.what,
                "predicted": row.predicted,
                "actual": row.actual,
                "unit": row.unit,
                "actual is": None if row.ratio is None else f"{row.ratio:.2f} x",
                "verdict": row.verdict,
            }
            for row in rows
        ],
        title=f"run {finished.run_id}: {finished.workload}/{finished.recipe} on {size}",
        notes=notes,
    )
    return 0


def _calibrated(entry: Entry, path: Path) -> str:
    learned = ", ".join(f"{name} {value:g}" for name, value in entry.constants.items())
    return f"calibrated: {learned}; written to {path}"
