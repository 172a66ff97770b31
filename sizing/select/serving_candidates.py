"""Sizes to serve a model with: dollars per million inferences at the actual demand."""

from typing import Any

from sizing import catalogue
from sizing.catalogue import Price
from sizing.models.serving import Throughput, batch_usd_per_million, published, serve_online
from sizing.select.requirements import UNSUPPORTED, Candidate, Prices, Requirements


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
        elif requirements.needs_cuda and catalogue.find(size).kind != "gpu":
            left_out[size] = "needs CUDA: no NVIDIA GPU"
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
        least_instances=requirements.min_instances,
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
        more=["one instance is a single point of failure: --min-instances 2"]
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
        figures={
            **figures,
            "per_second": throughput.per_second,
            "throughput": throughput.basis,
        },
        reasons=(*reasons, f"throughput from {throughput.source}"),
        cautions=(*([unsupported] if unsupported else []), *cautions),
        is_supported=unsupported is None,
    )
