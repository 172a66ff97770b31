"""Advise on the size for a workload: candidates by dollars, with triggers for another size.

python -m sizing advise trajectory --recipe full --size g5.2xlarge
python -m sizing advise imagenet --deadline-hours 24 --max-usd 50     (what keeps both?)
python -m sizing advise imagenet --deadline-hours 24 --objective hours --market on-demand --gpus 4
python -m sizing advise imagenet --max-usd 50 --region any
python -m sizing advise trajectory --given parallel_jobs=4 --given gpu_utilization_percent=12
python -m sizing advise trajectory --sizes g5.xlarge,g6 --explain     (side by side)
python -m sizing advise trajectory --runs 4 --hours-per-week 5
python -m sizing advise trajectory --run out/demo/run     (signals from a finished run)
python -m sizing advise imagenet --markdown --growth 20 > assessment.md     (to keep or to paste)
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from sizing import catalogue
from sizing.catalogue import PRICE_REGION
from sizing.catalogue.prices import snapshot
from sizing.catalogue.refresh import load
from sizing.catalogue.sizes import families
from sizing.cli.shared_options import (
    FLAG,
    NUMBER,
    Options,
    add_options,
    add_request_arguments,
    planner,
    price_ages,
    request,
)
from sizing.cli.tables import print_json, show_table, table_cell
from sizing.models.constants import GIB
from sizing.models.fitted import fitted
from sizing.models.footprints import trained_samples
from sizing.plan.advice import PlannedSize, Wanted, best, changes, rank, would_change
from sizing.plan.checks import VOLUME_PER_DATASET
from sizing.plan.finished_run import read_run
from sizing.plan.outcomes import MARKETS
from sizing.plan.plan_inputs import Request
from sizing.plan.report import plan_json
from sizing.plan.side_by_side import ways
from sizing.plan.size_plan import Plan
from sizing.plan.spot_verdict import spot_verdict
from sizing.plan.triggers import Fired, as_given, fire, load_rules

HELP = "which size to use and why; triggers with their evidence"
DEFAULT_SIZE = "g5.2xlarge"
_BUDGETED = 4
# An advice that rests on an older price begins with that.
_OLD_DAYS = 60
# How many sizes are compared in all regions.
_SEARCHED = 6
WEEKS_A_YEAR = 52


_OPTIONS: Options = {
    "--recipe": ({"default": "full"}, "default: %(default)s"),
    "--size": ({"default": DEFAULT_SIZE}, "the size in use (default: %(default)s)"),
    "--sizes": ({}, "candidates or families, comma-separated (default: all)"),
    "--explain": (FLAG, "also show memory, epoch, notice and warnings of each"),
    "--given": (
        {"action": "append", "default": [], "metavar": "SIGNAL=VALUE"},
        "a signal that you know, such as parallel_jobs=4",
    ),
    "--run": ({"dest": "folder", "type": Path}, "a finished run's folder or receipt"),
    "--hours-per-week": (NUMBER, "show dollars a week, month and year"),
    "--growth": ({"type": float, "metavar": "PERCENT"}, "sizes for this monthly growth of samples"),
    "--markdown": (FLAG, "a page with date, verdict and chart"),
}
_WISHES: Options = {
    "--max-usd": (NUMBER, "most dollars for the instances"),
    "--market": (
        {"choices": MARKETS, "metavar": "NAME"},
        "spot, on-demand or fallback, which has a deadline (default: any)",
    ),
    "--objective": (
        {"choices": ("usd", "hours"), "default": "usd", "metavar": "NAME"},
        "what to minimize: usd or hours (default: %(default)s)",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("workload", help="as in `python -m sizing plan`")
    add_options(parser, _OPTIONS)
    add_request_arguments(parser)
    parser.set_defaults(gpus=None)  # searched
    add_options(parser, _WISHES)


def run(arguments: argparse.Namespace) -> int:
    """Print the advice."""
    given, origin = _given(arguments.given), "given"
    hours = arguments.hours_per_week
    if hours is not None and not 0 < hours <= 168:
        raise ValueError(f"hours per week are {hours:g}; use more than 0, at most 168")
    for name in ("deadline_hours", "max_usd"):
        limit = getattr(arguments, name)
        if limit is not None and not 0 < limit < 1e9:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {limit:g}; use a number above 0, below 1e9")
    if arguments.market == "fallback" and arguments.deadline_hours is None:
        raise ValueError("--market fallback buys on demand for a deadline; add --deadline-hours")
    anywhere = arguments.region == "any"
    arguments.region = PRICE_REGION if anywhere else arguments.region
    gpus, there = arguments.gpus, catalogue.find(arguments.size).num_gpus
    arguments.gpus = gpus and min(gpus, there)  # of the size in use
    plan, asked = planner(arguments), as_given(request(arguments, arguments.size), given)
    current = plan(asked)
    if arguments.folder is not None:
        given, origin = {**read_run(arguments.folder).signals(), **given}, "measured"
    fired = fire(current, load_rules(), given, origin)
    wanted = Wanted(
        hours=arguments.deadline_hours,
        usd=arguments.max_usd,
        gpus=gpus,
        market=arguments.market,
        objective=arguments.objective,
    )
    names = sizes(arguments.sizes) if arguments.sizes else None
    found = rank(asked, plan=plan, sizes=names, wanted=wanted)
    if anywhere:
        found = _everywhere(found, asked, plan)
    if arguments.json:
        print_json("advise", _document(arguments, current, fired, found))
        return 0 if found[0].keeps else 1
    later = _horizons(arguments.growth, asked, plan, names, wanted)
    _show(arguments, current, fired, found, later)
    return 0 if found[0].keeps else 1


def _horizons(
    growth: float | None,
    asked: Request,
    plan: Callable[[Request], Plan],
    names: list[str] | None,
    wanted: Wanted,
) -> list[dict[str, Any]]:
    """Return what to use now, in three and in six months, if data grows this much a month."""
    if growth is None:
        return []
    if not -50 <= growth <= 1000:
        raise ValueError(f"growth is {growth:g} % a month; use -50 to 1000")
    now = plan(asked)
    rows = []
    for months in (0, 3, 6):
        factor = (1 + growth / 100) ** months
        samples = round(trained_samples(now.inputs.footprints) * factor)
        dataset = now.inputs.dataset_bytes * factor / GIB
        then = replace(asked, samples=samples, dataset_gib=dataset)
        if asked.data_on == "ebs":
            least = math.ceil(dataset * VOLUME_PER_DATASET)
            then = replace(then, volume_gib=max(asked.data_gib, least))
        found = rank(then, plan=plan, sizes=names, wanted=wanted)
        able = found[0].outcomes is not None
        says = verdict(found)[0] if able else "; ".join(found[0].findings.problems.values())
        when = f"in {months} months" if months else "now"
        rows.append(
            {"when": when, "samples": samples, "volume_gib": then.data_gib, "verdict": says}
        )
    return rows


def _show(
    arguments: argparse.Namespace,
    current: Plan,
    fired: list[Fired],
    found: list[PlannedSize],
    later: list[dict[str, Any]],
) -> None:
    """Show the candidates, then what may change the choice; or all of it as a page."""
    display = partial(show_table, markdown=arguments.markdown)
    old = [text for text in [old_prices(found)] if text]
    if not arguments.markdown:
        print(*old, sep="\n", end="\n" * bool(old))
    by = "cheapest" if found[0].wanted.objective == "usd" else "fastest"
    if arguments.markdown:
        today = datetime.now(UTC).date()
        asked = " ".join(["python -m sizing", *sys.argv[1:]])
        title = f"# {arguments.workload}: which size"
        print(title, f"{today}, `{asked}`", *old, *verdict(found)[:1], _chart(found), sep="\n\n")
    show_candidates(
        found,
        title=f"candidates, {by} first: p50 to p90 (modelled)",
        explain=arguments.explain,
        markdown=arguments.markdown,
    )
    size, spot = current.request.size, spot_verdict(current)
    # Limits concern the size to choose, not the size in use.
    is_asked = arguments.markdown or arguments.given or not found[0].wanted.is_limited
    if is_asked:
        display([], notes=["", *_triggers(fired, size)])
    if later:
        display(later, title=f"if samples grow by {arguments.growth:g} % a month")
    if current.request.runs > 1:
        display(way_rows(current), title=f"{current.request.runs} runs, on demand (modelled)")
    if rows := budget_rows(current, found, arguments.hours_per_week):
        display(rows, title=f"dollars at {arguments.hours_per_week:g} hours a week")
    if is_asked:
        display([], notes=[f"Spot suits this on {size}: {spot.suits}; {'; '.join(spot.reasons)}"])


def _chart(found: list[PlannedSize]) -> str:
    """Draw the first sizes' dollars in Mermaid, p50 as bars and p90 as a line."""
    drawn = [each for each in first_of_each(found) if each.outcomes]
    names = ", ".join(f'"{each.plan.request.size} x {each.plan.request.gpus}"' for each in drawn)
    p50, p90 = (
        ", ".join(f"{each.outcomes.usd_at(share):.2f}" for each in drawn if each.outcomes)
        for share in (0.5, 0.9)
    )
    title = '    title "dollars of the run: p50, and p90 as a line"'
    lines = ("```mermaid", "xychart-beta", title, f"    x-axis [{names}]", f"    bar [{p50}]")
    return "\n".join([*lines, f"    line [{p90}]", "```"])


def _everywhere(
    found: list[PlannedSize], asked: Request, plan: Callable[[Request], Plan]
) -> list[PlannedSize]:
    """Return the first sizes in every region with known prices, on Spot alone and on demand."""
    wanted = found[0].wanted
    first = list(dict.fromkeys(each.plan.request.size for each in found if each.outcomes))
    every = []
    for region in snapshot().regions:
        prices = replace(asked.prices, region=region, answers=load(region))
        there = replace(asked, prices=prices)
        names = [size for size in first[:_SEARCHED] if there.prices.find(size)[0]]
        if names:
            every += rank(there, plan=plan, sizes=names, wanted=wanted, most_fallbacks=0)
    return sorted(every or found, key=lambda each: each.order)


def _document(
    arguments: argparse.Namespace, current: Plan, fired: list[Fired], found: list[PlannedSize]
) -> dict[str, Any]:
    cheapest = best(found)
    spot = spot_verdict(current)
    return {
        "take": cheapest.plan.request.size,
        "keeps_limits": cheapest.keeps,
        "old_prices": old_prices(found),
        "verdict": verdict(found),
        "would_change": would_change(cheapest.plan),
        "spot_suits": spot.suits,
        "spot_reasons": list(spot.reasons),
        "usd_of_interruption": current.usd_of_interruption,
        "seconds_of_interruption": current.interruption_seconds,
        "triggers": [_fired(each) for each in fired],
        "candidates": [
            candidate_row(each)
            | ({"plan": plan_json(each.plan, each.findings)} if arguments.explain else {})
            for each in found
        ],
        "ways": way_rows(current) if current.request.runs > 1 else [],
        "budget": budget_rows(current, found, arguments.hours_per_week),
    }


def _triggers(fired: list[Fired], size: str) -> list[str]:
    """Return a paragraph for each trigger, and at the end what Spot is worth."""
    if not fired:
        return [f"no trigger fires on {size}"]
    found = [f"triggers that fire on {size}:"]
    for each in fired:
        rule = each.rule
        says = f" ({rule.says})" if rule.says else ""
        verdict = "see below" if rule.signal == "spot_saving_percent" else each.verdict
        found += [
            f"- {rule.condition}, {table_cell(each.value)} {each.origin}: "
            f"consider {rule.consider}{says}?",
            f"  {verdict}",
        ]
    return found


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
    current: Plan, found: list[PlannedSize], hours_per_week: float | None
) -> list[dict[str, Any]]:
    """Return what the size in use and the first candidates cost at these hours a week."""
    if hours_per_week is None:
        return []
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
                f"--given {pair!r} is out of range; use a number from 0"
                + (" to 100" if most == 100 else "")
            )
    return found


_SHOWN = 8


def sizes(text: str) -> list[str]:
    """Return sizes from names and families separated by commas; an unknown one is a ValueError."""
    found: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name in families():
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


def candidate_row(candidate: PlannedSize) -> dict[str, Any]:
    """Return a size as JSON, with null where it cannot work."""
    plan, outcomes = candidate.plan, candidate.outcomes
    return {
        "size": plan.request.size,
        "gpus": plan.request.gpus,
        "market": outcomes and outcomes.market,
        "region": plan.request.prices.region,
        "chance": round(candidate.chance, 3),
        "usd_p50": outcomes and round(outcomes.usd_at(0.5), 3),
        "usd_p90": outcomes and round(outcomes.usd_at(0.9), 3),
        "hours_p50": outcomes and round(outcomes.hours_at(0.5), 3),
        "hours_p90": outcomes and round(outcomes.hours_at(0.9), 3),
        "usd_on_demand": round(plan.usd_on_demand, 3),
        "bound_by": plan.work.main.bound_by,
        "reasons": list(candidate.reasons),
        "why_not": list(candidate.findings.problems.values()),
    }


def show_candidates(
    found: Sequence[PlannedSize], *, title: str, explain: bool = False, markdown: bool = False
) -> None:
    """Show the first sizes, why some cannot work, what is not known, and which to use."""
    shown, cheapest = first_of_each(found), best(found)
    notes = [
        *(
            f"{each.plan.request.size}: {problem}"
            for each in shown
            for name, problem in each.findings.problems.items()
            if name not in ("deadline", "budget")  # the chance says it
        ),
        *(f"{e.plan.request.size}: {w}" for e in shown if explain for w in e.findings.warnings),
        *_unseen(shown),
        *_own_images(shown),
        *verdict(found),
        *(
            f"{each.plan.request.size}, in Compute Optimizer's words: {', '.join(each.reasons)}"
            for each in (shown if explain else shown[:1])
            if each.reasons
        ),
        f"what would change this most: {would_change(cheapest.plan)}",
        price_ages(each.plan for each in found),
    ]
    rows = [_row(each) | (_explained(each.plan) if explain else {}) for each in shown]
    usual = {"GPUs": "1 of 1", "market": "spot", "region": PRICE_REGION, "chance": ""}
    dull = [name for name, value in usual.items() if all(row[name] == value for row in rows)]
    show_table(
        [{n: row[n] for n in row if n not in dull} for row in rows],
        title=title,
        notes=notes,
        markdown=markdown,
    )


def verdict(found: Sequence[PlannedSize]) -> list[str]:
    """Say what to use and the next best, or what must change for anything to fit."""
    shown = first_of_each(found)
    first, wanted = shown[0], shown[0].wanted
    if not first.keeps:
        return [
            f"nothing keeps the limits in {wanted.chance:.0%} of the runs; what would keep them:",
            *(f"- {change}" for change in changes(list(found))),
        ]
    within = f", within the limits in {first.chance:.0%} of the runs" if wanted.is_limited else ""
    instance = first.plan.inputs.instance
    is_spot = first.outcomes and first.outcomes.market == "spot" and instance.quota_code
    notes = [
        f"use {first.name}: ${first.usd:.2f} and {first.hours:.2f} h (p50){within}, bound by "
        f"{first.plan.work.main.bound_by}" + f"; Spot quota: {instance.vcpus} vCPUs" * bool(is_spot)
    ]
    for second in shown[1:2]:
        if second.keeps:
            usd, hours = second.usd - first.usd, second.hours - first.hours
            notes.append(
                f"next best: {second.name}, ${abs(usd):.2f} {'more' if usd >= 0 else 'less'} and "
                f"{abs(hours):.2f} h {'longer' if hours >= 0 else 'shorter'}"
            )
    return notes


def first_of_each(found: Sequence[PlannedSize]) -> list[PlannedSize]:
    """Return the first of each size, GPU count and region: the market that suits it best."""
    first: dict[tuple[str, int, str], PlannedSize] = {}
    for each in found:
        asked = each.plan.request
        first.setdefault((asked.size, asked.gpus, asked.prices.region), each)
    return list(first.values())[:_SHOWN]


def _row(candidate: PlannedSize) -> dict[str, Any]:
    plan, outcomes = candidate.plan, candidate.outcomes
    return {
        "size": plan.request.size,
        "GPUs": f"{plan.request.gpus} of {plan.inputs.instance.num_gpus}",
        "market": outcomes.market if outcomes else "-",
        "region": plan.request.prices.region,
        "$": f"{outcomes.usd_at(0.5):.2f} to {outcomes.usd_at(0.9):.2f}" if outcomes else "-",
        "hours": f"{outcomes.hours_at(0.5):.2f} to {outcomes.hours_at(0.9):.2f}"
        if outcomes
        else "no end",
        "chance": f"{candidate.chance:.0%}" if candidate.wanted.is_limited else "",
        "on demand $": round(plan.usd_on_demand, 2),
        "bound by": plan.work.main.bound_by,
    }


def _explained(plan: Plan) -> dict[str, Any]:
    return {
        "GPU MiB": f"{plan.gpu_memory_need:,.0f} of {plan.inputs.instance.gpu_memory_mib:,}",
        "epoch s": round(plan.work.main.epoch_seconds, 1),
        "notice s": f"{plan.notice.total:.0f} of {plan.notice.budget:.0f}",
    }


def old_prices(found: Sequence[PlannedSize]) -> str:
    """Say how old the first's price is and what the newest known one changes; empty if it is new.

    Where none is newer, say how much it may rise before another size wins.
    """
    first, *others = first_of_each(found)
    asked, is_on_demand = first.plan.request, first.is_in("on-demand")
    price = first.plan.inputs.price if is_on_demand else first.plan.inputs.spot_price
    if first.outcomes is None or price.days_old <= _OLD_DAYS:
        return ""
    kept = replace(asked.prices, answers=None).find(asked.size)[not is_on_demand]
    other = next((e for e in others if e.keeps and e.plan.request.size != asked.size), None)
    is_newer = kept is not None and kept.day is not None and kept.days_old < price.days_old
    if is_newer and kept:
        usd = first.usd * kept.usd_per_hour * asked.hosts / price.usd_per_hour
        change = f"by the newest known, ${kept.usd_per_hour:g} of {kept.day}, "
        change += f"{other.name} wins" if other and usd > other.usd else f"it costs ${usd:.2f}"
    else:
        change = "none newer is known"
        change += f"; {other.usd / first.usd - 1:.0%} more: {other.name} wins" if other else ""
    return f"OLD PRICE: {asked.size}'s is of {price.day}, {change}"


def _own_images(shown: Sequence[PlannedSize]) -> list[str]:
    names = [e.plan.request.size for e in shown if e.plan.inputs.instance.needs_own_image]
    if not names:
        return []
    return [f"{', '.join(names)}: needs an image of your own (-c pytorch_ami_parameter=ami-...)"]


def _unseen(shown: Sequence[PlannedSize]) -> list[str]:
    """Say which GPUs have no published run, unless a run of ours is known."""
    names = dict.fromkeys(
        each.plan.inputs.gpu.name for each in shown if not each.plan.inputs.calibrated_by
    )
    unseen = [name for name in names if name not in fitted().runs]
    if not unseen:
        return []
    return [f"no published run on {', '.join(unseen)}"]
