"""Advise on the size for a workload: candidates by dollars, with triggers for another size.

python -m sizing advise trajectory --recipe full --size g5.2xlarge
python -m sizing advise trajectory --given parallel_jobs=4 --given gpu_utilization_percent=12
python -m sizing advise trajectory --sizes g5.xlarge,g6 --explain     (side by side)
python -m sizing advise trajectory --runs 4 --hours-per-week 5
python -m sizing advise trajectory --run out/demo/run     (signals from a finished run)
"""

import argparse
from pathlib import Path
from typing import Any

from sizing.cli.candidates import candidate_row, show_candidates, show_side_by_side, sizes
from sizing.cli.request import add_request_arguments, planner, request
from sizing.cli.tables import cell, print_json, show
from sizing.plan.advice import PlannedSize, best, rank, would_change
from sizing.plan.finished_run import read_run
from sizing.plan.plan import Plan
from sizing.plan.report import to_json
from sizing.plan.side_by_side import ways
from sizing.plan.spot_verdict import spot_verdict
from sizing.plan.triggers import RULES_FILE, Fired, as_given, fire, load_rules

HELP = "which size to use and why; triggers with their evidence"
DEFAULT_SIZE = "g5.2xlarge"
_BUDGETED = 4
WEEKS_A_YEAR = 52


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("workload", help="as in `python -m sizing plan`")
    parser.add_argument("--recipe", default="full", help="default: %(default)s")
    parser.add_argument(
        "--size", default=DEFAULT_SIZE, help="the size in use (default: %(default)s)"
    )
    parser.add_argument("--sizes", help="candidates or families, comma-separated (default: all)")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also memory, epoch, notice and warnings of each",
    )
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
    parser.add_argument(
        "--hours-per-week", type=float, metavar="N", help="show dollars a week, month and year"
    )
    add_request_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the advice."""
    given, origin = _given(arguments.given), "given"
    hours = arguments.hours_per_week
    if hours is not None and not 0 < hours <= 168:
        raise ValueError(f"hours per week are {hours:g}; give more than 0, at most 168")
    asked = as_given(request(arguments, arguments.size), given)

    plan = planner(arguments)
    current = plan(asked)
    if arguments.folder is not None:
        given, origin = {**read_run(arguments.folder).signals(), **given}, "measured"
    fired = fire(current, load_rules(arguments.rules), given, origin)
    found = rank(asked, plan=plan, sizes=sizes(arguments.sizes) if arguments.sizes else None)
    if arguments.json:
        print_json("advise", _document(arguments, current, fired, found))
        return 0
    show_candidates(found, title="candidates, cheapest first: p50 to p90 on Spot (modelled)")
    if arguments.explain:
        show_side_by_side(found)
    size, verdict = current.request.size, spot_verdict(current)
    show([], notes=["", *_triggers(fired, size)])
    if asked.runs > 1:
        show(way_rows(current), title=f"{asked.runs} runs, on demand (modelled)")
    if rows := _budget(arguments, current, found):
        show(rows, title=f"dollars at {arguments.hours_per_week:g} hours a week")
    show([], notes=[f"Spot suits this on {size}: {verdict.suits}; {'; '.join(verdict.reasons)}"])
    return 0


def _document(
    arguments: argparse.Namespace, current: Plan, fired: list[Fired], found: list[PlannedSize]
) -> dict[str, Any]:
    cheapest, fastest = best(found)
    verdict = spot_verdict(current)
    return {
        "take": cheapest.plan.request.size,
        "fastest_at_half_as_much_again": fastest.plan.request.size,
        "would_change": would_change(cheapest.plan),
        "spot_suits": verdict.suits,
        "spot_reasons": list(verdict.reasons),
        "usd_of_interruption": current.usd_of_interruption,
        "seconds_of_interruption": current.interruption_seconds,
        "triggers": [_fired(each) for each in fired],
        "candidates": [
            candidate_row(each)
            | ({"plan": to_json(each.plan, each.findings)} if arguments.explain else {})
            for each in found
        ],
        "ways": way_rows(current) if current.request.runs > 1 else [],
        "budget": _budget(arguments, current, found),
    }


def _triggers(fired: list[Fired], size: str) -> list[str]:
    """Return a paragraph for each trigger; what Spot is worth is said at the end."""
    if not fired:
        return [f"no trigger fires on {size}"]
    found = [f"triggers that fire on {size}:"]
    for each in fired:
        rule = each.rule
        says = f" ({rule.says})" if rule.says else ""
        verdict = "see below" if rule.signal == "spot_saving_percent" else each.verdict
        found += [
            f"- {rule.condition}, {cell(each.value)} {each.origin}: {rule.consider}{says}?",
            f"  {verdict}",
        ]
    return found


def _budget(
    arguments: argparse.Namespace, current: Plan, found: list[PlannedSize]
) -> list[dict[str, Any]]:
    hours = arguments.hours_per_week
    return [] if hours is None else budget_rows(current, found, hours)


def way_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return the ways to do the plan's runs."""
    return [
        {
            "way": way.what,
            "size": way.size,
            "hours": round(way.hours, 3),
            "usd_on_demand": round(way.usd, 3),
            "why_not": way.problem,
        }
        for way in ways(plan, plan.request.runs)
    ]


def budget_rows(
    current: Plan, found: list[PlannedSize], hours_per_week: float
) -> list[dict[str, Any]]:
    """Return what the size in use and the first candidates cost at so many hours a week."""
    plans = [current, *(each.plan for each in found[:_BUDGETED] if each.findings.fits)]
    unique = {plan.request.size: plan for plan in plans}
    now = current.inputs.price.usd_per_hour * hours_per_week
    rows = []
    for size, plan in unique.items():
        week = plan.inputs.price.usd_per_hour * hours_per_week
        spot_week = plan.inputs.spot_price.usd_per_hour * hours_per_week
        rows.append(
            {
                "size": size,
                "usd_week": round(week, 2),
                "usd_month": round(week * WEEKS_A_YEAR / 12, 2),
                "usd_year": round(week * WEEKS_A_YEAR),
                "usd_year_more": round((week - now) * WEEKS_A_YEAR),
                "spot_usd_week": round(spot_week, 2),
                "spot_usd_year": round(spot_week * WEEKS_A_YEAR),
            }
        )
    return rows


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
        most = 100 if name.endswith("_percent") else 1e12
        if not 0 <= found[name] <= most:
            raise ValueError(
                f"--given {pair!r} is out of range; give a number from 0"
                + (" to 100" if most == 100 else "")
            )
    return found
