"""Compare sizes for one workload, or recompute the figures of published comparison tables.

python -m sizing compare trajectory --sizes g5.xlarge,g5.2xlarge,g6e.xlarge
python -m sizing compare --tables 002

Tables: 000 sizes and Spot, 001 language models, 002 ImageNet, 003 detection, 004 serving.
"""

import argparse
from itertools import groupby
from typing import Any, get_args

from sizing import catalogue
from sizing.cli.plan import add_request_arguments, price_ages, request
from sizing.cli.tables import print_json, show
from sizing.evidence.seed_tables import SEEDS, Claim, Verdict, claims
from sizing.plan.checks import Findings, check_plan
from sizing.plan.plan import Plan, make_plan
from sizing.plan.report import to_json

HELP = "sizes side by side; comparison tables recomputed"
DEFAULT_SIZES = "g4dn.xlarge,g5.xlarge,g5.2xlarge,g5.4xlarge,g6.xlarge,g6e.xlarge"
_BAR = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("workload", nargs="?", help="as in `python -m sizing plan`")
    parser.add_argument(
        "--tables",
        choices=SEEDS,
        metavar="NUMBER",
        help=f"recompute these comparison tables: {', '.join(SEEDS)}",
    )
    # The option's first name.
    parser.add_argument("--seed", dest="tables", choices=SEEDS, help=argparse.SUPPRESS)
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
    if bool(arguments.workload) == bool(arguments.tables):
        raise ValueError("give either a workload or --tables, such as `compare trajectory`")
    if arguments.tables:
        return show_claims(claims(arguments.tables), as_json=arguments.json)
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


def show_claims(found: list[Claim], *, as_json: bool) -> int:
    """Show the tables one after the other, and how many claims hold."""
    counts = {word: sum(claim.verdict == word for claim in found) for word in get_args(Verdict)}
    if as_json:
        rows = [claim_document(claim) for claim in found]
        print_json("compare", {"claims": rows, "verdicts": counts}, version=2)
        return 0
    for table, group in groupby(found, key=lambda claim: claim.table):
        show([claim_row(claim) for claim in group], title=f"{found[0].seed}: {table}")
    show(
        [],
        notes=[
            f"{len(found)} claims: {', '.join(f'{n} {word}' for word, n in counts.items())}. "
            "Ours: from the catalogue, the models and counted footprints."
        ],
    )
    return 0


def claim_document(claim: Claim) -> dict[str, Any]:
    """Return a claim as JSON."""
    return {
        "table": claim.table,
        "what": claim.what,
        "lines": list(claim.lines),
        "written": claim.written,
        "claimed": claim.claimed,
        "ours": claim.ours,
        "unit": claim.unit,
        "verdict": claim.verdict,
        "difference": claim.difference,
        "why": claim.why,
    }


# "adds up": ours is computed from the document's own figures, and says nothing of them.
_SAME = {"reproduced": "as ours", "adds up": "adds up"}


def claim_row(claim: Claim) -> dict[str, Any]:
    """Return a claim for people; of one that holds no more is said."""
    unit = f" {claim.unit}" if claim.unit else ""
    return {
        "what": claim.what,
        "line": claim.lines[0],
        "claimed": f"{claim.claimed.replace('..', ' to ')}{unit}",
        "ours": claim.ours,
        "claimed is": _SAME.get(claim.verdict, claim.difference),
        "why": claim.why if claim.verdict not in _SAME else "",
    }
