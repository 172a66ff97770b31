"""Sizes for training and for work: GPUs that fit; CPUs by the cost of a day, with credits."""

from sizing import catalogue
from sizing.catalogue import InstanceType, Price
from sizing.models.burstable import FROM_MEMORY, day_of_work
from sizing.models.constants import Constants
from sizing.select.requirements import UNSUPPORTED, Candidate, Prices, Requirements


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
    if not instance.is_trainable:
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
