"""A plan as JSON (for plan.json and `plan --json`) and as rows for people."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from contract.goodput import Goodput
from sizing import catalogue
from sizing.catalogue import Price
from sizing.figures import Basis, rounded
from sizing.models.memory import MEMORY_PARTS
from sizing.plan.checks import Findings
from sizing.plan.goodput import planned_goodput
from sizing.plan.outcomes import deadline_fallback, deadline_sentence
from sizing.plan.size_plan import Plan
from sizing.plan.spot_verdict import spot_verdict
from sizing.plan.work import StagePlan
from sizing.service_prices import HOURS_PER_MONTH, IMAGE_GIB, S3_USD_PER_GB_MONTH
from sizing.spot.forecast import SpotForecast

# For so many days the bucket keeps what a newer save replaced: cdk.json's versions_kept_days.
VERSIONS_KEPT_DAYS = 14
# Loader and disk are worth a line above this share of the slowest part's time.
_NEAR = 0.25


def plan_json(plan: Plan, findings: Findings) -> dict[str, Any]:
    """Return the plan as plain JSON, with null if the run would never end on Spot."""
    spot = plan.spot
    seconds = {
        "epoch_seconds": plan.work.main.epoch_seconds,
        "hours_on_demand": plan.hours_on_demand,
        "hours_on_demand_p10": plan.hours_low,
        "hours_on_demand_p90": plan.hours_high,
        **_spot(spot, "hours_p50", "hours_p90"),
        "usd_per_hour": plan.inputs.price.usd_per_hour,
        "usd_spot_per_hour": plan.inputs.spot_price.usd_per_hour,
        "usd_on_demand": plan.usd_on_demand,
        "usd_spot_p50": spot.usd_p50 if spot else None,
        "usd_spot_p90": spot.usd_p90 if spot else None,
        **_spot(spot, "interruptions", "no_machine_share", "first_wait_hours"),
        "checkpoint_interval_seconds": spot.interval_seconds if spot else None,
        "checkpoint_seconds": plan.notice.save,
        "life_hours": plan.inputs.interruptions.learned_life_hours,
        "restart_seconds": plan.restart.seconds,
        "interruption_seconds": plan.interruption_seconds,
        "usd_of_interruption": plan.usd_of_interruption,
        "usd_of_initialization": plan.usd_of_initialization,
        "usd_of_initializations": plan.usd_of_initializations,
    }
    return {
        "format": 1,
        "workload": plan.request.workload,
        "recipe": plan.request.recipe,
        "size": plan.request.size,
        "hosts": plan.request.hosts,
        "region": plan.request.prices.region,
        "fits": findings.fits,
        "gpu_memory_mib": round(plan.work.memory.need),
        "gpu_memory_there_mib": plan.inputs.instance.gpu_memory_mib,
        "bound_by": plan.work.main.bound_by,
        "gpu_share": plan.used_gpus / plan.inputs.instance.num_gpus,
        "gpu_busy_percent": [rounded(each) for each in plan.work.busy_percent],
        **{name: None if value is None else rounded(value) for name, value in seconds.items()},
        **{name: _rounded(asdict(getattr(plan, name))) for name in ("first", "restart")},
        "checkpoint_bytes": plan.inputs.checkpoint_bytes,
        "notice_fits": plan.notice.fits,
        "spot_suits": spot_verdict(plan).suits,
        "warnings": list(findings.warnings),
        "problems": dict(findings.problems),
        "calibrated_by": list(plan.inputs.calibrated_by),
        "with_fallback": _with_fallback(plan),
        "stages": [_stage(stage) for stage in plan.work.stages],
        "goodput": {cause: rounded(share) for cause, share in planned_goodput(plan).items()},
        "figures": figures(plan),
    }


def _rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: rounded(value) for name, value in numbers.items()}


def _spot(spot: SpotForecast | None, *names: str) -> dict[str, float | None]:
    return {name: getattr(spot, name, None) for name in names}


def _with_fallback(plan: Plan) -> dict[str, Any] | None:
    """Return the cost of the run with a deadline; null without one."""
    fallback = deadline_fallback(plan)
    if fallback is None:
        return None
    names = (field.name for field in fields(fallback) if field.name != "outcomes")
    return {name: rounded(getattr(fallback, name)) for name in names}


def _stage(stage: StagePlan) -> dict[str, Any]:
    memory, step = stage.memory, stage.step
    return {
        "stage": stage.footprint.stage,
        "micro_batch": stage.footprint.micro_batch,
        "steps": round(stage.footprint.steps_per_epoch * stage.footprint.epochs),
        "step_seconds": rounded(step.seconds),
        "step_seconds_p10": rounded(step.seconds_low),
        "step_seconds_p90": rounded(step.seconds_high),
        "epoch_seconds": rounded(stage.epoch_seconds),
        "seconds": rounded(stage.seconds),
        "bound_by": stage.bound_by,
        "phases": [
            {
                "name": phase.phase.name,
                "epochs": rounded(phase.phase.epochs),
                "step_seconds": rounded(phase.step.seconds),
                "seconds": rounded(phase.seconds),
                "bound_by": phase.bound_by,
            }
            for phase in stage.phases
        ],
        "evaluation_seconds": rounded(stage.evaluation_seconds),
        "gpu_memory_mib": round(memory.need),
        "usual_gpu_memory_mib": None if memory.usual_need is None else round(memory.usual_need),
        "allocated_mib": rounded(memory.allocated),
        "memory_mib": {name: rounded(getattr(memory, name)) for name in (*MEMORY_PARTS, "logits")},
    }


def figures(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the decisive figures, each with its basis and source."""
    inputs, main = plan.inputs, plan.work.main
    precision, taken = main.footprint.precision, inputs.interruptions
    step: tuple[Basis, str] = ("modelled", main.step.basis)
    if inputs.calibrated_by:
        step = ("measured", f"calibrated by {', '.join(inputs.calibrated_by)}")
    memory = (
        f"{main.footprint.source}; + {inputs.constants.fragmentation_share:.0%} fragments, "
        f"+ {inputs.constants.context_mib:.0f} MiB context (from memory)"
    )
    losses: Basis = "given" if taken.source == "given" else "published"
    peak = inputs.gpu.peak_flops(precision) / 1e12
    rows: dict[str, tuple[float, str, Basis, str]] = {
        "gpu_memory": (plan.work.memory.need, "MiB", "modelled", memory),
        "step": (main.step.seconds, "s", *step),
        "gpu": (peak, f"TFLOP/s {precision}", inputs.gpu.basis, inputs.gpu.source),
        "on_demand": _price(inputs.price),
        "spot": _price(inputs.spot_price),
        "interruptions": (taken.rate_per_hour, "per machine hour", losses, taken.source),
        "first": (plan.first.seconds, "s", "modelled", plan.first.sentence()),
        "restart": (plan.restart.seconds, "s", "modelled", plan.restart.sentence()),
        "notice": (plan.notice.total, "s", "modelled", plan.notice.sentence()),
        "host": (plan.host.need, "GiB", "modelled", plan.host.sentence()),
    }
    return {
        name: {"value": rounded(value), "unit": unit, "basis": basis, "source": source}
        for name, (value, unit, basis, source) in rows.items()
    }


def _price(price: Price) -> tuple[float, str, Basis, str]:
    modelled, given = price.basis in ("modelled", "assumed"), price.basis == "given"
    basis: Basis = "modelled" if modelled else "given" if given else "published"
    return price.usd_per_hour, "$/h", basis, price.source


def _usual(plan: Plan) -> str:
    """Return the need of an average batch, for use before the largest one's, if sizes differ."""
    usual = plan.work.memory.usual_need
    if usual is None:
        return ""
    runs = plan.request.runs_per_gpu(plan.inputs.instance)
    return f"{usual * runs:,.0f} for batches of the average size, for the largest "


def summary(plan: Plan) -> list[tuple[str, str]]:
    """Return the main figures, one line each."""
    spot, verdict = plan.spot, spot_verdict(plan)
    least, busy, most = plan.work.busy_percent
    return [
        (
            "GPU memory",
            f"{_usual(plan)}{plan.gpu_memory_need:,.0f} of "
            f"{plan.inputs.instance.gpu_memory_mib:,} MiB",
        ),
        *_host(plan),
        (
            "bound by",
            f"{plan.work.main.bound_by} (stage {plan.work.main.footprint.stage}); GPU busy "
            f"{busy:.0f} % ({least:.0f} to {most:.0f})",
        ),
        *_rates(plan),
        ("epoch", _epoch(plan.work.main)),
        (
            "work",
            f"{duration(plan.work.seconds)}; {duration(plan.work.seconds_low)} to "
            f"{duration(plan.work.seconds_high)} for similar runs (p10 to p90)",
        ),
        ("on demand", _on_demand(plan)),
        (
            "Spot",
            f"{duration(spot.hours_p50 * 3600)} (p50) to {duration(spot.hours_p90 * 3600)} (p90), "
            f"${spot.usd_p50:.2f} to ${spot.usd_p90:.2f}, {spot.interruptions:.2g} interruptions"
            if spot
            else "would never end",
        ),
        *([("first machine", _first_machine(spot))] if spot else []),
        (
            "checkpoint",
            f"{plan.inputs.checkpoint_bytes / 1e6:,.0f} MB, {duration(plan.notice.save)} to save"
            + (_saves(plan, spot) if spot else ""),
        ),
        ("notice", f"{'fits' if plan.notice.fits else 'DOES NOT FIT'}: {plan.notice.sentence()}"),
        (
            "an interruption",
            f"{duration(plan.interruption_seconds)} and ${plan.usd_of_interruption:.3f}, of which "
            f"the restart {duration(plan.restart.seconds)}, waiting for data "
            f"{duration(plan.restart.sync + plan.restart.data_wait)}",
        ),
        *_initialization(plan),
        *([("goodput on Spot", _goodput(plan))] if spot else []),
        ("Spot suits it", f"{verdict.suits}: {'; '.join(verdict.reasons)}"),
        ("alternates", _alternates(plan)),
        *(
            [("with fallback", deadline_sentence(fallback))]
            if (fallback := deadline_fallback(plan))
            else []
        ),
    ]


def _goodput(plan: Plan) -> str:
    shares = planned_goodput(plan)
    paid = plan.work.seconds / (plan.spot.goodput if plan.spot else 1.0)
    return Goodput(seconds={cause: paid * share for cause, share in shares.items()}).sentence()


def _saves(plan: Plan, spot: SpotForecast) -> str:
    """Say how often it is saved, and what S3, which keeps what is replaced, costs for all saves."""
    gb = plan.inputs.checkpoint_bytes / 1e9 * plan.work.seconds / spot.interval_seconds
    usd = gb * S3_USD_PER_GB_MONTH / HOURS_PER_MONTH * 24 * VERSIONS_KEPT_DAYS
    all_saves = f"{gb:,.0f} GB in all, ${usd:.2f} in S3 for {VERSIONS_KEPT_DAYS} days"
    return f", every {duration(spot.interval_seconds)}: {all_saves}"


def _initialization(plan: Plan) -> list[tuple[str, str]]:
    """Say what loading the root volumes costs, if a rate is requested."""
    rate = plan.request.root_initialization_mib_per_second
    if not rate:
        return []
    return [
        (
            "root volumes",
            f"${plan.usd_of_initialization:.3f} for each machine, "
            f"${plan.usd_of_initializations:.2f} for the run on Spot, to load {IMAGE_GIB} GiB at "
            f"{rate:g} MiB/s; above, only the dollars of an interruption include it",
        )
    ]


def _rates(plan: Plan) -> list[tuple[str, str]]:
    """Say how many samples a second each part of the data path can deliver, slowest first."""
    main = plan.work.main
    phase = max(main.phases, key=lambda each: each.seconds)
    slowest = max(seconds for _, seconds in phase.waits)
    if all(seconds < slowest * _NEAR for name, seconds in phase.waits[1:]):
        return []
    volume = plan.inputs.volume.baseline
    what = {"disk": f"disk ({volume:,.1f} MB/s)"}
    samples = main.footprint.samples_per_epoch
    rates = [
        f"{what.get(name, name)} {samples / seconds:,.0f}"
        for name, seconds in sorted(phase.waits, key=lambda each: -each[1])
        if seconds
    ]
    at = f" at {phase.phase.name}" if phase.phase.name else ""
    if not dict(phase.waits)["disk"]:
        rates.append("no disk after the first epoch")
    return [("samples a second", f"{', '.join(rates)}{at}")]


def _epoch(main: StagePlan) -> str:
    within = f"; stage {main.footprint.stage} ends within one" if main.footprint.epochs < 1 else ""
    return duration(main.epoch_seconds) + within


def _host(plan: Plan) -> list[tuple[str, str]]:
    """Say what the host must hold, if a stage's start takes memory worth a line."""
    host = plan.host
    if host.starting.most < 0.1:
        return []
    return [
        (
            "host memory",
            f"{host.need:.1f} of {host.usable:.1f} GiB usable; {host.starting.sentence()}",
        )
    ]


def _alternates(plan: Plan) -> str:
    """Name the other sizes that the stack's fleet may start, with the highest price."""
    others = catalogue.alternates(plan.request.size, region=plan.request.prices.region)
    sizes = [other.size for other in others]
    if not sizes:
        return "none"
    prices = [plan.request.prices.find(size)[0] for size in sizes]
    if not all(prices):
        return f"{', '.join(sizes)}; not all have a known price in {plan.request.prices.region}"
    dearest = max(price.usd_per_hour for price in prices if price)
    return f"{', '.join(sizes)}; the dearest costs ${dearest:.3f} an hour on demand"


def _on_demand(plan: Plan) -> str:
    usd = plan.inputs.price.usd_per_hour
    return (
        f"{duration(plan.hours_on_demand * 3600)}, ${plan.usd_on_demand:.2f}; "
        f"{duration(plan.hours_low * 3600)} to {duration(plan.hours_high * 3600)}, "
        f"${plan.hours_low * usd:.2f} to ${plan.hours_high * usd:.2f} (p10 to p90)"
    )


def _first_machine(spot: SpotForecast) -> str:
    """Say what makes a short run's p90 long: the chance that no machine is free at its start."""
    if spot.first_wait_hours is None:
        return "comes at once"
    return (
        f"{1 - spot.no_machine_share:.0%} chance that it comes at once; else half of the waits "
        f"last more than {duration(3600 * spot.first_wait_hours)}"
    )


def plan_line(plan: Plan) -> str:
    """Return the plan in one sentence, for cdk synth."""
    spot, request, work = plan.spot, plan.request, plan.work
    costs = (
        f"{duration(spot.hours_p50 * 3600)} (p50) to {duration(spot.hours_p90 * 3600)} (p90) and "
        f"${spot.usd_p50:.2f} to ${spot.usd_p90:.2f} on Spot"
        if spot
        else "no end on Spot"
    )
    return (
        f"plan: {request.workload}/{request.recipe} on {request.size} takes "
        f"{costs}, ${plan.usd_on_demand:.2f} on demand; its work {duration(work.seconds_low)} to "
        f"{duration(work.seconds_high)} for similar runs; {work.memory.need:,.0f} of "
        f"{plan.inputs.instance.gpu_memory_mib:,} MiB GPU memory; bound by {work.main.bound_by}; "
        f"a checkpoint takes {plan.notice.total:.0f} of {plan.notice.budget:.0f} s of the notice "
        f"(modelled, prices of {request.prices.region}; details: STACK.plan.json)"
    )


def duration(seconds: float) -> str:
    """Return seconds in a readable unit."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86_400:.3g} days"
