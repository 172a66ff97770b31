"""Whether Spot suits a run: a verdict, with the reasons that decide it."""

from dataclasses import dataclass
from typing import Literal

from sizing.plan.size_plan import Plan

# Below this saving the interruptions are not worth it.
_LEAST_SAVING_PERCENT = 10.0
# Above this share of a run's hours, interruptions decide how long it takes.
_MANY = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotVerdict:
    """`suits` is "with care" if only reasons that can be fixed speak against it."""

    suits: Literal["yes", "with care", "no"]
    reasons: tuple[str, ...]


def saving_percent(plan: Plan) -> float:
    """Return the percent of on-demand dollars that Spot saves (p50, the same work on both)."""
    if plan.spot is None or not plan.usd_on_demand:
        return 0.0
    return 100 * (1 - (plan.spot.usd_of_p50_work) / plan.usd_on_demand)


def spot_verdict(plan: Plan, *, saving: float | None = None) -> SpotVerdict:
    """Judge a plan: saving (its own, or a given one), notice, cost of interruptions, time limit."""
    spot = plan.spot
    saving = saving_percent(plan) if saving is None else saving
    if spot is None:
        return SpotVerdict(suits="no", reasons=("the run would never end on Spot",))
    each = (
        f"{spot.interruptions:.2g} interruptions are expected, each costs "
        f"{plan.interruption_seconds / 60:.1f} min and ${plan.usd_of_interruption:.2f}"
    )
    saves = f"saves {saving:.0f} %" if saving >= 0 else f"costs {-saving:.0f} % more"
    if saving < _LEAST_SAVING_PERCENT:
        return SpotVerdict(suits="no", reasons=(f"it {saves} (p50)", each))
    reasons, cares = [f"it {saves} (p50)", each], []
    if spot.no_machine_share:
        reasons.append(f"{spot.no_machine_share:.0%} chance that no machine is free at the start")
    if plan.notice.fits:
        took, budget = plan.notice.total, plan.notice.budget
        reasons.append(f"a notice is enough to save: {took:.0f} of {budget:.0f} s")
    else:
        cares.append("the checkpoint does not fit the notice: what periodic saves left is lost")
    lost_hours = spot.interruptions * plan.interruption_seconds / 3600
    if lost_hours > _MANY * plan.hours_on_demand:
        cares.append(f"interruptions add {lost_hours:.1f} h to {plan.hours_on_demand:.1f} h")
    limit = plan.request.max_hours
    billed = spot.machine_hours_p90
    if limit is not None and billed > limit:
        cares.append(f"one run in ten is billed {billed:.1f} h, the limit is {limit:g} h")
    return SpotVerdict(suits="with care" if cares else "yes", reasons=(*cares, *reasons))
