"""The sizes for a workload as a table: dollars and hours with their range, and what differs.

What all of them share is one note below, not a column of the same words.
"""

from collections.abc import Sequence
from typing import Any

from sizing import catalogue
from sizing.cli.request import price_ages
from sizing.cli.tables import show
from sizing.models.fitted import fitted
from sizing.plan.advice import PlannedSize, best, would_change
from sizing.plan.plan import Plan

_SHOWN = 8
_BAR = 10
_APART = "too much or too little"


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


def candidate_row(candidate: PlannedSize) -> dict[str, Any]:
    """Return a size as JSON; null where it cannot work."""
    plan = candidate.plan
    spot = plan.spot if candidate.findings.fits else None
    figures = {
        "usd_spot_p50": spot.usd_p50 if spot else None,
        "usd_spot_p90": spot.usd_p90 if spot else None,
        "hours_p50": spot.hours_p50 if spot else None,
        "hours_p90": spot.hours_p90 if spot else None,
    }
    return {
        "size": plan.request.size,
        **{name: None if value is None else round(value, 3) for name, value in figures.items()},
        "usd_on_demand": round(plan.usd_on_demand, 3),
        "bound_by": plan.work.main.bound_by,
        "reasons": list(candidate.reasons),
        "why_not": list(candidate.findings.problems.values()),
    }


def show_candidates(found: Sequence[PlannedSize], *, title: str) -> None:
    """Show the first sizes, what they share, what is not known of them, and which to use."""
    shown = found[:_SHOWN]
    cheapest, fastest = best(list(found))
    shared = [code for code in cheapest.reasons if all(code in each.reasons for each in shown)]
    shared = shared if len(shown) > 1 else []
    notes = [
        *([f"all of these: {', '.join(shared)}"] if shared else []),
        *(
            f"{each.plan.request.size}: {problem}"
            for each in shown
            for problem in each.findings.problems.values()
        ),
        *_unseen(shown),
        f"use {cheapest.plan.request.size}: ${cheapest.usd:.2f} and {cheapest.hours:.2f} h (p50, "
        f"Spot), bound by {cheapest.plan.work.main.bound_by}",
        f"fastest for at most 1.5 times the cost: {fastest.plan.request.size}, "
        f"${fastest.usd:.2f} and {fastest.hours:.2f} h",
        f"what would change this most: {would_change(cheapest.plan)}",
        price_ages(each.plan for each in found),
    ]
    rows = [_row(each, shared) for each in shown]
    if not any(row[_APART] for row in rows):
        rows = [{name: row[name] for name in row if name != _APART} for row in rows]
    show(rows, title=title, notes=notes)


def show_side_by_side(found: Sequence[PlannedSize]) -> None:
    """Show every size's memory, epoch, notice and warnings; the bar is its share of the dearest."""
    highest = max(_dollars(each.plan) for each in found) or 1.0
    rows = [
        {
            "size": each.plan.request.size,
            "fits": each.findings.fits,
            "GPU MiB": round(each.plan.gpu_memory_need),
            "of MiB": each.plan.inputs.instance.gpu_memory_mib,
            "epoch s": round(each.plan.work.main.epoch_seconds, 1),
            "notice s": f"{each.plan.notice.total:.0f} of {each.plan.notice.budget:.0f}",
            "Spot $, p90": "#" * max(1, round(_BAR * _dollars(each.plan) / highest)),
        }
        for each in found
    ]
    warnings = [(each.plan.request.size, text) for each in found for text in each.findings.warnings]
    show(
        rows,
        title="side by side",
        notes=[
            *(f"{size}: {text}" for size, text in warnings),
            "modelled; `python -m sizing plan` shows the basis of each figure",
        ],
    )


def _dollars(plan: Plan) -> float:
    return plan.spot.usd_p90 if plan.spot else plan.usd_on_demand


def _row(candidate: PlannedSize, shared: Sequence[str]) -> dict[str, Any]:
    plan = candidate.plan
    spot = plan.spot if candidate.findings.fits else None
    return {
        "size": plan.request.size,
        "Spot $": f"{spot.usd_p50:.2f} to {spot.usd_p90:.2f}" if spot else "-",
        "hours": f"{spot.hours_p50:.2f} to {spot.hours_p90:.2f}" if spot else "no end",
        "on demand $": round(plan.usd_on_demand, 2),
        "bound by": plan.work.main.bound_by,
        _APART: [code for code in candidate.reasons if code not in shared],
    }


def _unseen(shown: Sequence[PlannedSize]) -> list[str]:
    """Say on which GPUs nobody has published a run, unless a run here is known."""
    names = dict.fromkeys(
        each.plan.inputs.gpu.name for each in shown if not each.plan.inputs.calibrated_by
    )
    unseen = [name for name in names if name not in fitted().runs]
    if not unseen:
        return []
    return [f"no published run on {', '.join(unseen)}: the range is that of GPUs not seen before"]
