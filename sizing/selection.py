"""Which sizes suit a phase of a model's life, by rules that name themselves; ranked by dollars.

The flow of the selection guide (seed document 004): phase, then burstable, CPU, GPU or inference
chip, then the latency goal. Where today's answer differs from the guide's, it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sizing import catalogue
from sizing.burstable import FROM_MEMORY, day_of_work, is_burstable
from sizing.catalogue import Instance, Price
from sizing.serving import (
    Throughput,
    batch_usd_per_million,
    published,
    serve_online,
)

Phase = Literal["experiment", "prepare", "train", "tune", "serve-batch", "serve-online"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Prices = Callable[[str], tuple[Price | None, Price | None]]

# AWS's page on Inf1: "Inf1 instances are no longer supported", by the Neuron SDK.
UNSUPPORTED = {
    "inf1": "the Neuron SDK no longer supports Inf1",
    "p3": "p3 is absent from the EC2 API's data since 2026",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What is asked for. None means: not said."""

    phase: Phase
    model: str | None = None
    throughputs: Mapping[str, Throughput] = field(default_factory=dict)
    requests_per_minute: float | None = None
    latency_goal_ms: float | None = None
    least_instances: int = 1
    needs_cuda: bool = False
    gpu_memory_mib: int | None = None
    memory_gib: float = 0.0
    vcpus: int = 0
    cpu_percent: float = 20.0
    hours_per_day: float = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One size that would do: what it costs in the unit of its phase, why, and what to mind."""

    size: str
    usd: float
    figures: Mapping[str, Any]
    reasons: tuple[str, ...]
    cautions: tuple[str, ...] = ()
    is_supported: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The ranking, what was left out and by which rule, and where the guide says otherwise."""

    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, str]
    differs: tuple[str, ...]


def select(need: Need, prices: Prices) -> Selection:
    """Rank what suits `need`; supported sizes first, then by dollars."""
    left_out: dict[str, str] = {}
    if need.phase in ("serve-online", "serve-batch"):
        found = _serving(need, prices, left_out)
    elif need.phase in ("train", "tune"):
        found = _training(need, prices, left_out)
    else:
        found = _working(need, prices, left_out)
    found.sort(key=lambda each: (not each.is_supported, each.usd, each.size))
    return Selection(candidates=tuple(found), left_out=left_out, differs=_differences(need, found))


def _serving(need: Need, prices: Prices, left_out: dict[str, str]) -> list[Candidate]:
    """Sizes with a known throughput, given or published."""
    is_online = need.phase == "serve-online"
    known = published(need.model, "online" if is_online else "batch") if need.model else ()
    throughputs = {each.size: each for each in known} | dict(need.throughputs)
    found = []
    for size, throughput in throughputs.items():
        on_demand, spot = prices(size)
        family = catalogue.families()[catalogue.find(size).family]
        price = on_demand if is_online else spot
        if price is None:
            left_out[size] = "no price is known"
        elif need.needs_cuda and family.kind != "gpu":
            left_out[size] = "needs CUDA: no NVIDIA GPU"
        elif is_online:
            one = _online(need, throughput, price)
            if isinstance(one, str):
                left_out[size] = one
            else:
                found.append(one)
        else:
            found.append(_batch(throughput, price))
    return found


def _online(need: Need, throughput: Throughput, price: Price) -> Candidate | str:
    """One size that serves requests as they come, or why it cannot."""
    assert need.requests_per_minute is not None
    assert need.latency_goal_ms is not None
    demand = need.requests_per_minute / 60
    service = serve_online(
        throughput,
        demand_per_second=demand,
        latency_goal_ms=need.latency_goal_ms,
        usd_per_hour=price.usd_per_hour,
        least_instances=need.least_instances,
    )
    if service is None:
        return (
            f"one inference takes {throughput.service_ms:.3g} ms or waits too long: the goal of "
            f"{need.latency_goal_ms:g} ms is out of reach"
        )
    reasons = (
        f"{service.instances} x ${price.usd_per_hour:g}/h for {demand:.4g} requests/s is "
        f"${service.usd_per_million:.2f} a million; busy {service.utilization:.1%} of the time",
        f"95 % answered in {service.latency_ms:.0f} ms (modelled: M/D/1)",
    )
    return _served(
        throughput,
        usd=service.usd_per_million,
        figures={
            "$ per million": service.usd_per_million,
            "instances": service.instances,
            "$/h": service.usd_per_hour,
            "busy %": 100 * service.utilization,
            "p95 ms": service.latency_ms,
        },
        reasons=reasons,
        more=["one instance is a single point of failure: --min-instances 2"]
        if service.instances == 1
        else [],
    )


def _batch(throughput: Throughput, price: Price) -> Candidate:
    """One size that works through a pile of requests on Spot and is stopped."""
    usd = batch_usd_per_million(throughput, usd_per_hour=price.usd_per_hour)
    reason = (
        f"a million takes {1e6 / throughput.per_second / 3600:.3g} h at ${price.usd_per_hour:g}/h "
        f"on Spot ({price.basis})"
    )
    figures = {"$ per million": usd, "Spot $/h": price.usd_per_hour}
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
    if throughput.latency_ms is None and "p95 ms" in figures:
        cautions.append(
            f"no published latency: taken as {throughput.service_ms:.0f} ms, one by one"
        )
    if throughput.basis in ("scaled", "derived"):
        cautions.append(f"throughput {throughput.basis}: {throughput.note}")
        cautions.append(f"measure it before you rely on it: --throughput {throughput.size}=N")
    if catalogue.families()[instance.family].kind == "chip":
        cautions.append("the model must compile with the Neuron SDK; CUDA kernels do not run")
    unsupported = UNSUPPORTED.get(instance.family)
    return Candidate(
        size=throughput.size,
        usd=usd,
        figures={
            **figures,
            "per second": throughput.per_second,
            "throughput": throughput.basis,
        },
        reasons=(*reasons, f"throughput from {throughput.source}"),
        cautions=(*([unsupported] if unsupported else []), *cautions),
        is_supported=unsupported is None,
    )


def _training(need: Need, prices: Prices, left_out: dict[str, str]) -> list[Candidate]:
    """Sizes that the stack can train on, by the Spot price of an hour."""
    wanted = need.gpu_memory_mib or 0
    found = []
    for instance in catalogue.instances().values():
        reason = _why_not_train(instance, need, wanted)
        _, spot = prices(instance.size)
        if reason or spot is None:
            if (
                instance.num_accelerators
                and catalogue.families()[instance.family].kind != "gpu-amd"
            ):
                left_out[instance.size] = reason or "no price is known"
            continue
        fits = f"{instance.num_gpus} x {instance.gpu_memory_mib:,} MiB for {wanted:,} MiB"
        found.append(
            Candidate(
                size=instance.size,
                usd=spot.usd_per_hour,
                figures={
                    "Spot $/h": spot.usd_per_hour,
                    "Spot basis": spot.basis,
                    "GPUs": f"{instance.num_gpus} x {instance.gpu}",
                    "MiB each": instance.gpu_memory_mib,
                    "vCPU": instance.vcpus,
                    "GiB": instance.memory_gib,
                },
                reasons=(
                    fits if wanted else "any GPU memory: give --gpu-memory-mib",
                    "several runs side by side fit on several GPUs or sizes: one run each"
                    if need.phase == "tune"
                    else "checkpoints survive interruptions, so Spot",
                ),
                cautions=()
                if instance.current_generation
                else ("AWS calls it a previous generation",),
            )
        )
    return found


def _why_not_train(instance: Instance, need: Need, wanted: int) -> str | None:
    """The rule that leaves a size out, if one does."""
    kind = catalogue.families()[instance.family].kind
    if kind == "chip":
        return "needs the Neuron SDK; the training code is CUDA"
    if instance.num_gpus == 0:
        return "no whole NVIDIA GPU"
    if not instance.is_trainable:
        return UNSUPPORTED.get(instance.family, "the PyTorch AMI's release note does not name it")
    if instance.gpu_memory_mib < wanted:
        return f"{instance.gpu_memory_mib:,} MiB is less than {wanted:,} MiB"
    if instance.memory_gib < need.memory_gib or instance.vcpus < need.vcpus:
        return "less host memory or vCPUs than asked for"
    return None


def _working(need: Need, prices: Prices, left_out: dict[str, str]) -> list[Candidate]:
    """CPU sizes by what a day of work costs, burst credits counted."""
    found = []
    for instance in catalogue.instances().values():
        kind = catalogue.families()[instance.family].kind
        if kind not in ("cpu", "burstable"):
            continue
        on_demand, _ = prices(instance.size)
        if instance.memory_gib < need.memory_gib or instance.vcpus < need.vcpus:
            left_out[instance.size] = "less memory or vCPUs than asked for"
        elif need.phase == "prepare" and kind == "burstable":
            left_out[instance.size] = "data preparation keeps the CPUs busy: credits run out"
        elif on_demand is not None:
            found.append(_day(instance, need, on_demand))
    return found


def _day(instance: Instance, need: Need, price: Price) -> Candidate:
    """A day on one CPU size."""
    figures: dict[str, Any] = {"$/h": price.usd_per_hour}
    reasons, cautions = [], []
    usd = need.hours_per_day * price.usd_per_hour
    if is_burstable(instance.size):
        day = day_of_work(
            instance.size,
            cpu_percent=need.cpu_percent,
            hours=need.hours_per_day,
            usd_per_hour=price.usd_per_hour,
        )
        usd = day.usd
        reasons.append(
            f"base {day.baseline_percent:.0f} % of each vCPU; {day.spent:.0f} credits spent of "
            f"{day.earned:.0f} earned in {need.hours_per_day:g} h"
        )
        if day.surplus:
            cautions.append(
                f"{day.surplus:.0f} credits a day are not earned and cost "
                f"${day.surplus / 60 * 0.05:.2f}; alarm on CPUCreditBalance"
            )
        if instance.size in FROM_MEMORY:
            cautions.append("its credits an hour are from memory")
    else:
        reasons.append("all of each vCPU, all the time")
    return Candidate(
        size=instance.size,
        usd=usd,
        figures={"$ a day": usd, **figures, "vCPU": instance.vcpus, "GiB": instance.memory_gib},
        reasons=tuple(reasons),
        cautions=tuple(cautions),
    )


def _differences(need: Need, found: list[Candidate]) -> tuple[str, ...]:
    """Where the guide of seed document 004 says otherwise, and why it no longer holds."""
    if need.phase == "experiment":
        return ("It takes T2: a legacy family; T3 replaced it.",)
    if need.phase in ("train", "tune"):
        return ("It takes P3 for training: legacy, absent from the EC2 API's data since 2026.",)
    if need.phase != "serve-online" or not found:
        return ()
    best, lines = found[0], []
    by_size = {each.size: each for each in found}
    inf1, g4dn = by_size.get("inf1.xlarge"), by_size.get("g4dn.xlarge")
    if inf1 and best is not inf1:
        lines.append(
            f"It takes Inf1 because it costs less than G4dn: ${inf1.usd:.2f} a million would be "
            "the least of these, but the Neuron SDK no longer supports Inf1."
        )
    if g4dn and best.usd < g4dn.usd and best.size.startswith(("c5", "m5")):
        lines.append(
            f"It compares accelerators; at this demand they idle (g4dn.xlarge: busy "
            f"{g4dn.figures['busy %']:.0f} %, ${g4dn.usd:.2f} a million), and {best.size} meets "
            f"the goal for ${best.usd:.2f}."
        )
    if need.model and "m5.large" not in by_size:
        lines.append(
            "It calls m5.large a bottleneck: no throughput of it was found published; give yours "
            "with --throughput m5.large=N."
        )
    return tuple(lines)
