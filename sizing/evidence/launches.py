"""Seconds of a kernel launch, from published steps so small that the GPU waits for its host.

The hosts of EC2's GPUs were not measured; each is taken for the published hosts most like it.
"""

from statistics import geometric_mean, median, quantiles

from sizing.evidence.truths import Truth, counts, gpu_of, predictable, step_of
from sizing.models.constants import Constants
from sizing.models.fitted import Fitted, Launch
from sizing.models.step_time import roofline

# Where the GPU works for more of the step than this, the step says little about launches.
_MOST_WORK = 0.5
_UNKNOWN = Launch(low=1.0, likely=1.0, high=1.0, hosts="the question here")
_DESKTOP, _ZEN_2 = "a desktop of 2025", "EPYC 7742"
_T4_SERVER, _BROADWELL = "a T4 server of NVIDIA", "Xeon E5-2698 v4"
# EC2: g5 has EPYC 7R32 (Zen 2), g6, g6e and p5 EPYC 7R13 (Zen 3) or newer, p3 Xeon E5-2686 v4
# (Broadwell), g4dn and p4d Xeon of the generation between it and Zen 3.
HOSTS = {
    "NVIDIA A10G": (_ZEN_2,),
    "NVIDIA T4": (_T4_SERVER,),
    "NVIDIA V100": (_BROADWELL,),
    "NVIDIA A100": (_ZEN_2, _T4_SERVER),
    "NVIDIA A100 80GB": (_ZEN_2, _T4_SERVER),
    "other": (_DESKTOP, _ZEN_2),
}


def seconds_per_kernel(truth: Truth) -> float:
    """Return the seconds of a published step for each kernel that it starts."""
    kernels = counts()[truth.model][truth.counted_as]["kernels_per_step"]
    return truth.measured / 1000 / float(kernels)


def is_launch_bound(truth: Truth, found: Fitted) -> bool:
    """Whether the GPU's own work explains less than half of a published step."""
    if truth.precision.startswith("forward"):
        return truth.batch == 1
    step = roofline(step_of(truth), gpu_of(truth), Constants(), launch=_UNKNOWN, found=found)
    return step.seconds < _MOST_WORK * truth.measured / 1000


def by_host(found: Fitted) -> dict[str, list[float]]:
    """Return the seconds of a launch in every launch-bound row, by host."""
    rows: dict[str, list[float]] = {}
    for truth in predictable("launches"):
        if is_launch_bound(truth, found):
            rows.setdefault(truth.host, []).append(seconds_per_kernel(truth))
    return rows


def launches(found: Fitted) -> dict[str, Launch]:
    """Return the launch of each GPU's host: its hosts' medians, and how far steps scatter."""
    rows = by_host(found)
    medians = {host: median(each) for host, each in rows.items()}
    # Models scatter alike on every host, and some hosts have few rows: one spread for all.
    scatter = [value / medians[host] for host, each in rows.items() for value in each]
    tenths = quantiles(scatter, n=10, method="inclusive")
    return {
        gpu: Launch(
            low=min(medians[host] for host in hosts) * tenths[0],
            likely=geometric_mean([medians[host] for host in hosts]),
            high=max(medians[host] for host in hosts) * tenths[-1],
            hosts=" to ".join(hosts),
        )
        for gpu, hosts in HOSTS.items()
    }
