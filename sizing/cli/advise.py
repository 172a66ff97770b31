"""Advise on the size for a workload: candidates by dollars, with triggers for another size.

python -m sizing advise trajectory --recipe full --size g5.2xlarge
python -m sizing advise trajectory --given parallel_jobs=4 --given gpu_utilization_percent=12
python -m sizing advise trajectory --run out/demo/run     (signals from a finished run)
"""

import argparse
from pathlib import Path
from typing import Any

from sizing.cli.compare import sizes
from sizing.cli.plan import add_request_arguments, price_ages, request
from sizing.cli.tables import print_json, show
from sizing.plan.advice import PlannedSize, best, rank, would_change
from sizing.plan.finished_run import read_run
from sizing.plan.plan import make_plan
from sizing.plan.triggers import RULES_FILE, Fired, fire, load_rules

HELP = "which size to use and why; triggers with their evidence"
_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("workload", help="as in `python -m sizing plan`")
    parser.add_argument("--recipe", default="full", help="default: %(default)s")
    parser.add_argument(
        "--size", default="g5.2xlarge", help="the size in use (default: %(default)s)"
    )
    parser.add_argument("--sizes", help="candidates, separated by commas (default: all)")
    parser.add_argument(
        "--given",
        action="append",
        default=[],
        metavar="SIGNAL=VALUE",
        help="a signal that you know, such as parallel_jobs=4",
    )
    parser.add_argument(
        "--run", dest="folder", type=Path, help="a finished run's folder or receipt"
    )
    parser.add_argument(
        "--rules", type=Path, default=RULES_FILE, help="triggers as JSON (default: %(default)s)"
    )
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the advice."""
    asked = request(arguments, arguments.size)
    current = make_plan(asked)
    given, origin = _given(arguments.given), "given"
    if arguments.folder is not None:
        given, origin = {**read_run(arguments.folder).signals(), **given}, "measured"
    fired = fire(current, load_rules(arguments.rules), given, origin)
    found = rank(asked, sizes=sizes(arguments.sizes) if arguments.sizes else None)
    cheapest, fastest = best(found)
    if arguments.json:
        print_json(
            "advise",
            {
                "take": cheapest.plan.request.size,
                "fastest_at_half_as_much_again": fastest.plan.request.size,
                "would_change": would_change(cheapest.plan),
                "triggers": [_fired(each) for each in fired],
                "candidates": [_candidate(each) for each in found],
            },
        )
        return 0
    _show(arguments.size, cheapest, fastest, fired, found)
    return 0


def _show(
    size: str,
    cheapest: PlannedSize,
    fastest: PlannedSize,
    fired: list[Fired],
    found: list[PlannedSize],
) -> None:
    taken = cheapest.plan.request.size
    notes = [
        f"use {taken}: ${cheapest.usd:.2f} and {cheapest.hours:.2f} h (p50, Spot), bound by "
        f"{cheapest.plan.work.main.bound_by}",
        f"fastest for at most 1.5 times the cost: {fastest.plan.request.size}, "
        f"${fastest.usd:.2f} and {fastest.hours:.2f} h",
        f"what would change this most: {would_change(cheapest.plan)}",
    ]
    show(
        [_candidate(each) for each in found[:_SHOWN]],
        title="candidates, cheapest first (modelled)",
        notes=[*notes, price_ages(each.plan for each in found)],
    )
    show(
        [_fired(each) for each in fired],
        title=f"triggers that fire on {size}",
        notes=[] if fired else [f"no trigger fires on {size}"],
    )


def _candidate(candidate: PlannedSize) -> dict[str, Any]:
    plan = candidate.plan
    return {
        "size": plan.request.size,
        "usd_spot_p50": round(candidate.usd, 3) if candidate.usd < float("inf") else None,
        "hours_p50": round(candidate.hours, 3) if candidate.hours < float("inf") else None,
        "usd_on_demand": round(plan.usd_on_demand, 3),
        "bound_by": plan.work.main.bound_by,
        "reasons": list(candidate.reasons),
        "why_not": list(candidate.findings.problems.values()),
    }


def _fired(fired: Fired) -> dict[str, Any]:
    return {
        "trigger": fired.rule.condition,
        "value": round(fired.value, 2),
        "from": fired.origin,
        "consider": fired.rule.consider,
        "rule_of_thumb": fired.rule.says,
        "verdict": fired.verdict,
    }


def _given(pairs: list[str]) -> dict[str, float]:
    found = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            found[name] = float(text)
        except ValueError:
            raise ValueError(f"--given {pair!r} cannot be read; write SIGNAL=NUMBER") from None
        if not 0 <= found[name] < 1e12:
            raise ValueError(f"--given {pair!r} is out of range; give a number from 0")
    return found
