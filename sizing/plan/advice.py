"""Advice on the size: every size that could train the workload, ranked by dollars, with reasons."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from sizing import catalogue
from sizing.catalogue.prices import UnknownPriceError
from sizing.models.fitted import fitted
from sizing.plan.checks import TIGHT, Findings, check_plan
from sizing.plan.plan import Plan, make_plan
from sizing.plan.request import Request

# A resource used less than this share is overprovisioned, as AWS Compute Optimizer calls it.
_LITTLE = 0.25
# A size that is faster by less is as fast.
_AS_FAST = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSize:
    """A size with its plan, and the resources it has too much or too little of."""

    plan: Plan
    findings: Findings
    reasons: tuple[str, ...]

    @property
    def usd(self) -> float:
        """Dollars of the run on Spot (p50); infinite where it cannot work."""
        if not self.findings.fits or self.plan.spot is None:
            return float("inf")
        return self.plan.spot.usd_p50

    @property
    def hours(self) -> float:
        """Hours of the run on Spot (p50)."""
        return self.plan.spot.hours_p50 if self.plan.spot else float("inf")


def rank(
    request: Request, *, plan: Callable[[Request], Plan] = make_plan, sizes: list[str] | None = None
) -> list[PlannedSize]:
    """Return the sizes, cheapest first; those that cannot work come last, with the reason."""
    names = sizes or [
        each.size for each in catalogue.trainable_by_price() if each.num_gpus >= request.gpus
    ]
    if not names:
        raise ValueError(f"gpus is {request.gpus}; no size in the catalogue has as many")
    found = []
    for size in names:
        try:
            planned = plan(replace(request, size=size))
        except UnknownPriceError:
            if sizes:
                raise
            continue  # probably not sold in this region
        found.append(
            PlannedSize(plan=planned, findings=check_plan(planned), reasons=reasons(planned))
        )
    return sorted(found, key=lambda each: (each.usd, each.plan.usd_on_demand))


def reasons(plan: Plan) -> tuple[str, ...]:
    """Return reason codes as AWS Compute Optimizer has them: {Resource}{Over,Under}provisioned."""
    memory = plan.gpu_memory_need / plan.inputs.instance.gpu_memory_mib
    host = plan.host.need / plan.inputs.instance.memory_gib
    found = [
        *_code("GPUMemory", memory),
        *_code("Memory", host),
    ]
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


def best(ranked: list[PlannedSize]) -> tuple[PlannedSize, PlannedSize]:
    """Return the cheapest size, and the cheapest of the fastest at most 1.5 times as dear."""
    cheapest = ranked[0]
    if cheapest.usd == float("inf"):
        problems = "; ".join(cheapest.findings.problems.values())
        raise ValueError(f"no size can run this: {problems}")
    affordable = [each for each in ranked if each.usd <= 1.5 * cheapest.usd]
    least = min(each.hours for each in affordable)
    return cheapest, next(each for each in affordable if each.hours <= _AS_FAST * least)


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
