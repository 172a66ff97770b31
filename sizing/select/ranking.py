"""The ranking of sizes for a phase of a model's life: candidates by dollars, with reasons.

Sizes for training: GPUs that fit. Sizes for work: CPUs by the cost of a day, with credits. Sizes
for serving: by the cost of a million inferences. Where the answer differs from common advice, it
says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sizing import catalogue
from sizing.catalogue import InstanceType, Price
from sizing.models.burstable import FROM_MEMORY, day_of_work
from sizing.models.constants import Constants
from sizing.models.serving import Throughput, batch_usd_per_million, published, serve_online

Phase = Literal["experiment", "prepare", "train", "tune", "serve-batch", "serve-online"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Prices = Callable[[str], tuple[Price | None, Price | None]]

# AWS's page on Inf1 in the Neuron SDK: "Inf1 instances are no longer supported".
UNSUPPORTED = {
    "inf1": "the Neuron SDK no longer supports Inf1",
    "p3": "p3 is absent from the EC2 API's data since 2026",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """The purpose of the size and what it must offer; None for no requirement."""

    phase: Phase
    model: str | None = None
    throughputs: Mapping[str, Throughput] = field(default_factory=dict)
    requests_per_minute: float | None = None
    latency_ms: float | None = None
    gpu_memory_mib: int | None = None
    memory_gib: float = 0.0
    vcpus: int = 0
    cpu_percent: float = 20.0
    hours_per_day: float = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A size that meets the requirements: cost in the unit of its phase, reasons and cautions."""

    size: str
    usd: float
    figures: Mapping[str, Any]
    reasons: tuple[str, ...]
    cautions: tuple[str, ...] = ()
    is_supported: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeSelection:
    """The ranking, what was left out and why, and where common advice differs."""

    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, str]
    differs: tuple[str, ...]


def training_candidates(
    requirements: Requirements, prices: Prices, left_out: dict[str, str]
) -> list[Candidate]:
    """Return the sizes that the stack can train on, with the Spot price of an hour."""
    wanted = requirements.gpu_memory_mib or 0
    found = []
    for instance in catalogue.instances().values():
        reason = _why_not_train(instance, requirements, wanted)
        _, spot = prices(instance.size)
        if reason or spot is None:
            if instance.num_accelerators and instance.kind != "gpu-amd":
                left_out[instance.size] = reason or "no price is known"
            continue
        fits = f"{instance.num_gpus} x {instance.gpu_memory_mib:,} MiB for {wanted:,} MiB"
        found.append(
            Candidate(
                size=instance.size,
                usd=spot.usd_per_hour,
                figures={
                    "spot_usd_per_hour": spot.usd_per_hour,
                    "spot_basis": spot.basis,
                    "gpus": f"{instance.num_gpus} x {instance.gpu}",
                    "gpu_memory_mib": instance.gpu_memory_mib,
                    "vcpus": instance.vcpus,
                    "memory_gib": instance.memory_gib,
                },
                reasons=(
                    fits if wanted else "any GPU memory; add --gpu-memory-mib to filter",
                    "for runs side by side use several GPUs or instances: one run each"
                    if requirements.phase == "tune"
                    else "checkpoints survive interruptions, so Spot",
                ),
                cautions=()
                if instance.current_generation
                else ("AWS calls it a previous generation",),
            )
        )
    return found


def _why_not_train(instance: InstanceType, requirements: Requirements, wanted: int) -> str | None:
    """Return the rule that excludes a size, if any."""
    if instance.kind == "chip":
        return "needs the Neuron SDK; the training code is CUDA"
    if instance.num_gpus == 0:
        return "no NVIDIA GPU of its own"
    if not instance.is_trainable or instance.needs_own_image:
        return UNSUPPORTED.get(instance.family, "the PyTorch AMI's release note does not name it")
    if instance.gpu_memory_mib < wanted:
        return f"{instance.gpu_memory_mib:,} MiB is less than {wanted:,} MiB"
    if instance.memory_gib < requirements.memory_gib or instance.vcpus < requirements.vcpus:
        return "less host memory or fewer vCPUs than required"
    return None


def working_candidates(
    requirements: Requirements, prices: Prices, left_out: dict[str, str]
) -> list[Candidate]:
    """Return the CPU sizes with the cost of a day of work, burst credits included."""
    found, constants = [], Constants()
    for instance in catalogue.instances().values():
        if instance.kind not in ("cpu", "burstable"):
            continue
        on_demand, _ = prices(instance.size)
        if instance.memory_gib < requirements.memory_gib or instance.vcpus < requirements.vcpus:
            left_out[instance.size] = "less memory or fewer vCPUs than required"
        elif instance.memory_gib * constants.usable_memory_share < constants.process_gib:
            left_out[instance.size] = (
                f"a Python process with torch takes {constants.process_gib:g} GiB"
            )
        elif requirements.phase == "prepare" and instance.kind == "burstable":
            left_out[instance.size] = "data preparation keeps the CPUs busy: credits run out"
        elif on_demand is not None:
            found.append(_day(instance, requirements, on_demand))
    return found


def _day(instance: InstanceType, requirements: Requirements, price: Price) -> Candidate:
    """Return a day's cost on one CPU size."""
    reasons, cautions = [], []
    usd = requirements.hours_per_day * price.usd_per_hour
    if instance.kind == "burstable":
        day = day_of_work(
            instance.size,
            cpu_percent=requirements.cpu_percent,
            hours=requirements.hours_per_day,
            usd_per_hour=price.usd_per_hour,
        )
        usd = day.usd
        reasons.append(
            f"baseline {day.baseline_percent:.0f} % of each vCPU; {day.spent:.0f} credits spent of "
            f"{day.earned:.0f} earned in {requirements.hours_per_day:g} h"
        )
        if day.surplus:
            cautions.append(
                f"{day.surplus:.0f} credits a day exceed those earned and cost "
                f"${day.surplus / 60 * 0.05:.2f}; alarm on CPUCreditBalance"
            )
        if instance.size in FROM_MEMORY:
            cautions.append("its credits per hour are from memory (unchecked)")
    else:
        reasons.append("every vCPU at full speed, all the time")
    return Candidate(
        size=instance.size,
        usd=usd,
        figures={
            "usd_per_day": usd,
            "usd_per_hour": price.usd_per_hour,
            "vcpus": instance.vcpus,
            "memory_gib": instance.memory_gib,
        },
        reasons=tuple(reasons),
        cautions=tuple(cautions),
    )


def serving_candidates(
    requirements: Requirements, prices: Prices, left_out: dict[str, str]
) -> list[Candidate]:
    """Return the sizes with a known throughput, the user's own or published."""
    is_online = requirements.phase == "serve-online"
    known = (
        published(requirements.model, "online" if is_online else "batch")
        if requirements.model
        else ()
    )
    throughputs = {each.size: each for each in known} | dict(requirements.throughputs)
    found = []
    for size, throughput in throughputs.items():
        on_demand, spot = prices(size)
        price = on_demand if is_online else spot
        if price is None:
            left_out[size] = "no price is known"
        elif is_online:
            one = _online(requirements, throughput, price)
            if isinstance(one, str):
                left_out[size] = one
            else:
                found.append(one)
        else:
            found.append(_batch(throughput, price))
    return found


def _online(requirements: Requirements, throughput: Throughput, price: Price) -> Candidate | str:
    """Return one size that serves requests as they arrive, or why it cannot."""
    assert requirements.requests_per_minute is not None
    assert requirements.latency_ms is not None
    demand = requirements.requests_per_minute / 60
    service = serve_online(
        throughput,
        demand_per_second=demand,
        latency_goal_ms=requirements.latency_ms,
        usd_per_hour=price.usd_per_hour,
    )
    if service is None:
        return (
            f"one inference takes {throughput.service_ms:.3g} ms or waits too long: the goal of "
            f"{requirements.latency_ms:g} ms is out of reach"
        )
    reasons = (
        f"{service.instances} x ${price.usd_per_hour:g}/h for {demand:.4g} requests/s is "
        f"${service.usd_per_million:.2f} per million; busy {service.utilization:.1%} of the time",
        f"95 % answered in {service.latency_ms:.0f} ms (modelled: M/D/1)",
    )
    return _served(
        throughput,
        usd=service.usd_per_million,
        figures={
            "usd_per_million": service.usd_per_million,
            "instances": service.instances,
            "usd_per_hour": service.usd_per_hour,
            "busy_percent": 100 * service.utilization,
            "p95_ms": service.latency_ms,
        },
        reasons=reasons,
        more=["one instance is a single point of failure: run two"]
        if service.instances == 1
        else [],
    )


def _batch(throughput: Throughput, price: Price) -> Candidate:
    """Return one size that processes a batch of requests on Spot and is stopped."""
    usd = batch_usd_per_million(throughput, usd_per_hour=price.usd_per_hour)
    reason = (
        f"a million takes {1e6 / throughput.per_second / 3600:.3g} h at ${price.usd_per_hour:g}/h "
        f"on Spot ({price.basis})"
    )
    figures = {"usd_per_million": usd, "spot_usd_per_hour": price.usd_per_hour}
    return _served(throughput, usd=usd, figures=figures, reasons=(reason,), more=[])


def _served(
    throughput: Throughput,
    *,
    usd: float,
    figures: dict[str, Any],
    reasons: tuple[str, ...],
    more: list[str],
) -> Candidate:
    instance = catalogue.find(throughput.size)
    cautions = list(more)
    if throughput.latency_ms is None and "p95_ms" in figures:
        cautions.append(
            f"no published latency: {throughput.service_ms:.0f} ms assumed, one request at a time"
        )
    if throughput.basis in ("scaled", "derived"):
        cautions.append(f"throughput {throughput.basis}: {throughput.note}")
        cautions.append(f"measure it before relying on it: --throughput {throughput.size}=N")
    if instance.kind == "chip":
        cautions.append("the model must compile with the Neuron SDK; CUDA kernels do not run")
    unsupported = UNSUPPORTED.get(instance.family)
    return Candidate(
        size=throughput.size,
        usd=usd,
        figures={**figures, "per_second": throughput.per_second, "throughput": throughput.basis},
        reasons=(*reasons, f"throughput from {throughput.source}"),
        cautions=(*([unsupported] if unsupported else []), *cautions),
        is_supported=unsupported is None,
    )


def select(requirements: Requirements, prices: Prices) -> SizeSelection:
    """Rank the sizes that meet the requirements: supported ones first, then by dollars."""
    left_out: dict[str, str] = {}
    if requirements.phase in ("serve-online", "serve-batch"):
        found = serving_candidates(requirements, prices, left_out)
    elif requirements.phase in ("train", "tune"):
        found = training_candidates(requirements, prices, left_out)
    else:
        found = working_candidates(requirements, prices, left_out)
    found.sort(key=lambda each: (not each.is_supported, each.usd, each.size))
    return SizeSelection(
        candidates=tuple(found), left_out=left_out, differs=_differences(requirements, found)
    )


def _differences(requirements: Requirements, found: list[Candidate]) -> tuple[str, ...]:
    """Return where common advice differs, and why it no longer holds."""
    if requirements.phase == "experiment":
        return ("T2 for experiments: a legacy family, replaced by T3.",)
    if requirements.phase in ("train", "tune"):
        return ("P3 for training: a legacy family, absent from the EC2 API's data since 2026.",)
    if requirements.phase != "serve-online" or not found:
        return ()
    best, lines = found[0], []
    by_size = {each.size: each for each in found}
    inf1, g4dn = by_size.get("inf1.xlarge"), by_size.get("g4dn.xlarge")
    if inf1 and best is not inf1:
        lines.append(
            f"Inf1 because it costs less than G4dn: ${inf1.usd:.2f} per million would be the "
            "lowest here, but the Neuron SDK no longer supports Inf1."
        )
    if g4dn and best.usd < g4dn.usd and best.size.startswith(("c5", "m5")):
        lines.append(
            f"Compare accelerators: at this demand they idle (g4dn.xlarge: busy "
            f"{g4dn.figures['busy_percent']:.0f} %, ${g4dn.usd:.2f} per million), and {best.size} "
            f"meets the goal for ${best.usd:.2f}."
        )
    m5 = by_size.get("m5.large")
    if requirements.model and m5 and best is not m5 and "throughput" in m5.figures:
        lines.append(
            f"m5.large is a bottleneck: {m5.figures['instances']} of them carry the load for "
            f"${m5.usd:.2f} per million (its throughput is {m5.figures['throughput']}; measure it)."
        )
    return tuple(lines)
