"""Advice: every size, GPU count and market that could train the workload, with its chance.

A deadline, a budget, GPUs, a market and a region are limits if they are set, and searched if not;
candidates that keep the limits with the requested chance are ranked by the objective.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from contract.trainer_options import RANKS
from sizing import catalogue
from sizing.catalogue.prices import PRICE_REGION, UnknownPriceError
from sizing.catalogue.sizes import trainable_by_price
from sizing.models.fitted import fitted
from sizing.plan.checks import TIGHT, Findings, check_plan
from sizing.plan.outcomes import Market, Outcomes, deadline_fallback, on_demand, on_spot
from sizing.plan.plan_inputs import IdleGpusError, Request
from sizing.plan.size_plan import Plan, make_plan

# A resource used less than this is overprovisioned, in AWS Compute Optimizer's terms.
_LITTLE = 0.25
_MARKETS = {"spot": "on Spot", "fallback": "on Spot with fallback", "on-demand": "on demand"}
# A forecast with the fallback takes seconds: only this many are made, of the most promising.
_MOST_FALLBACKS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A buyer's wishes: None is searched or unlimited. `chance` is that of keeping the limits."""

    hours: float | None = None
    usd: float | None = None
    gpus: int | None = None
    market: Market | None = None
    objective: Literal["usd", "hours"] = "usd"
    chance: float = 0.9

    @property
    def is_limited(self) -> bool:
        """Whether hours or dollars are limited."""
        return self.hours is not None or self.usd is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSize:
    """A size with its plan in a market, and the resources it has too much or too little of."""

    plan: Plan
    findings: Findings
    reasons: tuple[str, ...]
    outcomes: Outcomes | None
    wanted: Wanted = field(default_factory=Wanted)

    @property
    def usd(self) -> float:
        """Dollars of the run (p50); infinite if it cannot work."""
        return self.outcomes.usd_at(0.5) if self.outcomes else float("inf")

    @property
    def hours(self) -> float:
        """Hours of the run (p50)."""
        return self.outcomes.hours_at(0.5) if self.outcomes else float("inf")

    @property
    def chance(self) -> float:
        """The chance that the run keeps the limits; 0 if it cannot work."""
        if self.outcomes is None:
            return 0.0
        return self.outcomes.chance(hours=self.wanted.hours, usd=self.wanted.usd)

    @property
    def keeps(self) -> bool:
        """Whether the limits are kept with the requested chance."""
        return self.outcomes is not None and self.chance >= self.wanted.chance

    @property
    def order(self) -> tuple[bool, float, float]:
        """Sort by the objective; those that miss the limits come last, the likelier first."""
        by = self.usd if self.wanted.objective == "usd" else self.hours
        return (not self.keeps, 0.0 if self.keeps else -self.chance, by)

    @property
    def name(self) -> str:
        """The size, market and region to buy, in readable words."""
        gpus, there = self.plan.request.gpus, self.plan.inputs.instance.num_gpus
        which = f"all {there}" if gpus == there else f"{gpus} of {there}"
        used = f" with {which} GPUs" if there > 1 else ""
        market = _MARKETS[self.outcomes.market] if self.outcomes else "nowhere"
        region = self.plan.request.prices.region
        where = "" if region == PRICE_REGION else f" in {region}"
        return f"{self.plan.request.size}{used} {market}{where}"

    def is_in(self, market: Market) -> bool:
        """Whether its outcomes are those of `market`."""
        return self.outcomes is not None and self.outcomes.market == market


def rank(
    request: Request,
    *,
    plan: Callable[[Request], Plan] = make_plan,
    sizes: list[str] | None = None,
    wanted: Wanted | None = None,
    most_fallbacks: int = _MOST_FALLBACKS,
) -> list[PlannedSize]:
    """Return what can be bought, best first; what cannot work comes last, with the reason.

    Without `wanted`, consider Spot alone with the request's GPUs.
    """
    asked = wanted or Wanted(gpus=request.gpus, market="spot")
    least = asked.gpus or 1
    names = sizes or [i.size for i in trainable_by_price() if i.num_gpus >= least]
    if not names:
        raise ValueError(f"gpus is {least}; no size in the catalogue has as many")
    # Left out if it was not asked for: what the region may not sell, GPUs that would be idle.
    errors = {UnknownPriceError: sizes, IdleGpusError: asked.gpus}
    left_out = [error for error, is_asked in errors.items() if not is_asked]
    plans = []
    for size in names:
        most = catalogue.find(size).num_gpus
        counts = [n for n in RANKS if n <= max(1, most) and n * request.hosts in RANKS]
        for gpus in [asked.gpus] if asked.gpus else counts:
            with suppress(*left_out):
                plans.append(plan(replace(request, size=size, gpus=gpus)))
    found = [each for made in plans for each in _markets(made, asked)]
    if asked.market in (None, "fallback") and asked.hours is not None:
        found += _with_fallback(found, asked, most_fallbacks)
    if asked.market is not None:
        found = [each for each in found if each.outcomes is None or each.is_in(asked.market)]
    if not found:
        raise ValueError(f"no size keeps the limits with --market {asked.market}; use another")
    return sorted(found, key=lambda each: (*each.order, each.plan.usd_on_demand))


def _markets(plan: Plan, wanted: Wanted) -> list[PlannedSize]:
    """Return the plan on Spot and on demand, or once without outcomes if it cannot work."""
    findings, why = check_plan(plan), reasons(plan)
    every = [on_spot(plan), on_demand(plan)] if findings.fits else [None]
    return [
        PlannedSize(plan=plan, findings=findings, reasons=why, outcomes=each, wanted=wanted)
        for each in every
    ]


def _with_fallback(found: list[PlannedSize], wanted: Wanted, most: int) -> list[PlannedSize]:
    """Return the plans with the fallback that may beat every plan that keeps the limits."""
    is_free = wanted.market is None
    best_usd = min((each.usd for each in found if is_free and each.keeps), default=float("inf"))
    # On demand it must end in time, and it costs no less than on Spot alone.
    in_time = {
        each.plan
        for each in found
        if each.is_in("on-demand") and replace(each, wanted=replace(wanted, usd=None)).keeps
    }
    spots = [each for each in found if each.is_in("spot") and each.plan in in_time]
    added: list[PlannedSize] = []
    for each in sorted(spots, key=lambda one: one.usd)[:most]:
        forecast = deadline_fallback(each.plan) if each.usd < best_usd else None
        if forecast is not None and not (is_free and each.keeps):
            added.append(replace(each, outcomes=forecast.outcomes))
            best_usd = min(best_usd, added[-1].usd if added[-1].keeps else best_usd)
    return added


def reasons(plan: Plan) -> tuple[str, ...]:
    """Return AWS Compute Optimizer's reason codes: {Resource}{Over,Under}provisioned."""
    memory = plan.gpu_memory_need / plan.inputs.instance.gpu_memory_mib
    host = plan.host.need / plan.inputs.instance.memory_gib
    found = _code("GPUMemory", memory) + _code("Memory", host)
    bound = plan.work.main.bound_by
    if bound == "loader CPU":
        found.append("CPUUnderprovisioned")
    if bound == "disk":
        resource = "EBS" if plan.request.data_on == "ebs" else "Disk"
        found.append(f"{resource}ThroughputUnderprovisioned")
    if bound == "kernel launches":
        found.append("GPUOverprovisioned")
    if not plan.notice.fits:
        found.append("NetworkBandwidthUnderprovisioned")
    if plan.inputs.instance.num_gpus > plan.used_gpus:
        found.append("GPUOverprovisioned")
    return tuple(dict.fromkeys(found))


def _code(resource: str, share: float) -> list[str]:
    if share > 1:
        return [f"{resource}Underprovisioned"]
    if share > TIGHT:
        return [f"{resource}Tight"]
    return [f"{resource}Overprovisioned"] if share < _LITTLE else []


def best(ranked: Sequence[PlannedSize]) -> PlannedSize:
    """Return the first; a ValueError if nothing can run it."""
    if ranked[0].outcomes is None:
        problems = "; ".join(ranked[0].findings.problems.values())
        raise ValueError(f"no size can run this: {problems}")
    return ranked[0]


def changes(ranked: Sequence[PlannedSize]) -> list[str]:
    """Say which single limit to relax so that something keeps the others."""
    wanted, able = ranked[0].wanted, [each for each in ranked if each.outcomes]
    found = []
    limits: dict[Literal["hours", "usd"], str] = {"hours": "deadline_hours", "usd": "max_usd"}
    for name, what in limits.items():
        limit = getattr(wanted, name)
        if limit is None:
            continue
        other = wanted.usd if name == "hours" else wanted.hours
        options = [
            (least, each)
            for each in able
            if each.outcomes
            and (least := each.outcomes.least(name, share=wanted.chance, below=other)) is not None
        ]
        if options:
            least, each = min(options, key=lambda option: option[0])
            found.append(f"{what}={least * 1.005:.3g} instead of {limit:g}: {each.name}")
    likeliest = max(able, key=lambda each: each.chance, default=None)
    if likeliest and likeliest.chance:
        found.append(f"a chance of {likeliest.chance:.0%}: {likeliest.name}")
    return found


def would_change(plan: Plan) -> str:
    """Return the measurement that would change the verdict most."""
    if plan.inputs.calibrated_by:
        return "a run on another GPU: the step time on this one is calibrated"
    if plan.inputs.gpu.name not in fitted().runs:
        return f"the step time of a real run: {plan.work.main.step.basis}"
    if plan.work.main.bound_by == "kernel launches":
        return (
            "the step time of a real run: this one is bound by kernel launches, which no count "
            "predicts well; `python -m sizing plan --run RUN --calibrate` records it"
        )
    if plan.work.main.bound_by == "loader CPU":
        return "samples per second of the loader alone, on one vCPU of that size"
    return "the step time of a real run (`python -m sizing plan --run RUN --calibrate` records it)"
