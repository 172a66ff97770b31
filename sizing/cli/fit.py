"""Fit the models' constants to published runs, and write them to sizing/models/fitted.json.

python -m sizing fit           fit and write
python -m sizing fit --check   write nothing; exit code 1 if the file is not what the fit gives
"""

import argparse
import json
from typing import Any

from sizing.cli.tables import print_json, show
from sizing.evidence import fitting
from sizing.models.fitted import FITTED_FILE, Fitted, fitted

HELP = "fit the constants to published runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Fit, then write or compare."""
    found = fitting.found()
    if arguments.check:
        differing = fitting.differences(found)
        if arguments.json:
            print_json("fit", {"differences": differing})
            return 1 if differing else 0
        for difference in differing:
            print(f"[failed] {difference}")
        print("[failed] write it: python -m sizing fit" if differing else f"[ok] {FITTED_FILE}")
        return 1 if differing else 0
    content = fitting.to_json(found)
    FITTED_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fitted.cache_clear()
    print_json("fit", content) if arguments.json else _show(found)
    return 0


def _show(found: Fitted) -> None:
    values: list[dict[str, Any]] = [
        *({"constant": f"time factor, {n}", "value": v} for n, v in found.time_factors.items()),
        {"constant": "passes of kept bytes", "value": found.traffic_passes},
        *({"constant": f"exponent, {n}", "value": v} for n, v in found.exponents.items()),
        {"constant": "workspace, MiB", "value": found.workspace_mib},
    ]
    show([{**row, "value": f"{row['value']:.3g}"} for row in values], title="step time and memory")
    show(
        [
            {"like": name, "p10": f"{i.low:.2f}", "p90": f"{i.high:.2f}", "runs": i.runs}
            for name, i in found.intervals.items()
        ],
        title="measured time / predicted time",
    )
    show(
        [
            {
                "GPU": gpu,
                "p10 us": round(launch.low * 1e6),
                "median us": round(launch.likely * 1e6),
                "p90 us": round(launch.high * 1e6),
                "hosts": launch.hosts,
            }
            for gpu, launch in found.launches.items()
        ],
        title="a kernel launch, microseconds",
    )
