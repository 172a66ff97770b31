"""The sizes for a workload as a table: dollars and hours with their range, and what differs.

What all of them share is one note below, not a column of the same words.
"""

from collections.abc import Sequence
from typing import Any

from sizing import catalogue
from sizing.catalogue import PRICE_REGION
from sizing.catalogue.sizes import families
from sizing.cli.request import price_ages
from sizing.cli.tables import show_table
from sizing.models.fitted import fitted
from sizing.plan.advice import PlannedSize, best, changes, would_change
from sizing.plan.plan import Plan

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
    notes = [
        f"use {first.name}: ${first.usd:.2f} and {first.hours:.2f} h (p50){within}, bound by "
        f"{first.plan.work.main.bound_by}"
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


def _unseen(shown: Sequence[PlannedSize]) -> list[str]:
    """Say which GPUs have no published run, unless a run of ours is known."""
    names = dict.fromkeys(
        each.plan.inputs.gpu.name for each in shown if not each.plan.inputs.calibrated_by
    )
    unseen = [name for name in names if name not in fitted().runs]
    if not unseen:
        return []
    return [f"no published run on {', '.join(unseen)}"]
