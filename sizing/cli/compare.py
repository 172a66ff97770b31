"""Compare sizes for one workload.

python -m sizing compare trajectory --sizes g5.xlarge,g5.2xlarge,g6e.xlarge
"""

import argparse
from typing import Any

from sizing import catalogue
from sizing.cli.plan import add_request_arguments, price_ages, request
from sizing.cli.tables import print_json, show
from sizing.plan.checks import Findings, check_plan
from sizing.plan.plan import Plan, make_plan
from sizing.plan.report import to_json

HELP = "sizes side by side"
DEFAULT_SIZES = "g4dn.xlarge,g5.xlarge,g5.2xlarge,g5.4xlarge,g6.xlarge,g6e.xlarge"
_BAR = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("workload", help="as in `python -m sizing plan`")
    parser.add_argument("--recipe", default="full", help="default: %(default)s")
    parser.add_argument(
        "--sizes",
        default=DEFAULT_SIZES,
        help="separated by commas, or a family (default: %(default)s)",
    )
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    plans = [_plan(arguments, size) for size in sizes(arguments.sizes)]
    checked = [(plan, check_plan(plan)) for plan in plans]
    if arguments.json:
        print_json("compare", {"plans": [to_json(*each) for each in checked]})
        return 0
    highest = max(_dollars(plan) for plan in plans) or 1.0
    show(
        [row(*each, highest) for each in checked],
        title=f"{arguments.workload}/{arguments.recipe}: hours and dollars p50 to p90 on Spot",
        notes=[
            *(
                f"{plan.request.size}: {text}"
                for plan, findings in checked
                for text in (*findings.problems.values(), *findings.warnings)
            ),
            "modelled; `python -m sizing plan` shows the basis of each figure",
            price_ages(plans),
        ],
    )
    return 0


def _plan(arguments: argparse.Namespace, size: str) -> Plan:
    return make_plan(request(arguments, size), footprints_file=arguments.footprints)


def sizes(text: str) -> list[str]:
    """Return sizes from names and families separated by commas; an unknown one is a ValueError."""
    found: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name in catalogue.families():
            found += [
                i.size
                for i in catalogue.instances().values()
                if i.family == name and i.is_trainable and i.on_demand_usd_per_hour
            ]
        else:
            found.append(catalogue.find(name).size)
    if not found:
        raise ValueError(f"--sizes {text!r} names no size to train on; try --sizes g5.xlarge")
    return found


def _dollars(plan: Plan) -> float:
    return (plan.spot.usd_p90 or 0.0) if plan.spot else plan.usd_on_demand


def row(plan: Plan, findings: Findings, highest: float) -> dict[str, Any]:
    """Return one row of the comparison; the bar is its dollars relative to the highest."""
    spot = plan.spot
    return {
        "size": plan.request.size,
        "fits": findings.fits,
        "GPU MiB": f"{plan.gpu_memory_need:,.0f} of {plan.inputs.instance.gpu_memory_mib:,}",
        "epoch s": round(plan.work.main.epoch_seconds, 1),
        "bound by": plan.work.main.bound_by,
        "hours": f"{spot.hours_p50:.2f} to {spot.hours_p90:.2f}" if spot else "no end",
        "Spot $": f"{spot.usd_p50:.2f} to {spot.usd_p90:.2f}" if spot else "-",
        "on demand $": round(plan.usd_on_demand, 2),
        "notice s": f"{plan.notice.total:.0f} of {plan.notice.budget:.0f}",
        "": "#" * max(1, round(_BAR * _dollars(plan) / highest)),
    }
