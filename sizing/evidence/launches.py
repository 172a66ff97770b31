"""Seconds of a kernel launch, from published steps so small that the GPU waits for its host.

The hosts of EC2's GPUs were not measured; each is taken for the published hosts most like it.
"""

from collections.abc import Sequence
from statistics import geometric_mean, median, quantiles

from sizing.evidence.truths import Truth, counts, gpu_of, predictable, step_of
from sizing.models.constants import Constants
from sizing.models.fitted import Fitted, Launch
from sizing.models.step_time import roofline

# Where the GPU works for more of the step than this, the step says little about launches.
_MOST_WORK = 0.5
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
    return truth.measured / 1000 / float(counts()[truth.model][truth.counted_as]["kernels_per_step"])


def is_launch_bound(truth: Truth, found: Fitted) -> bool:
    """Whether the GPU's own work explains less than half of a published step."""
    if truth.precision.startswith("forward"):
        return truth.batch == 1
    step = roofline(step_of(truth), gpu_of(truth), Constants(), found=found)
    return step.seconds < _MOST_WORK * truth.measured / 1000


def by_host(found: Fitted) -> dict[str, list[float]]:
    """Return the seconds of a launch in every launch-bound row, by host."""
    rows: dict[str, list[float]] = {}
    for truth in predictable("launches"):
        if is_launch_bound(truth, found):
            rows.setdefault(truth.host, []).append(seconds_per_kernel(truth))
    return rows


def launches(found: Fitted) -> dict[str, Launch]:
    """Return the launch of each GPU's host: from the fastest's p10 to the slowest's p90."""
    rows = by_host(found)
    return {gpu: _launch([rows[host] for host in hosts], hosts) for gpu, hosts in HOSTS.items()}


def _launch(rows: Sequence[Sequence[float]], hosts: Sequence[str]) -> Launch:
    tenths = [quantiles(each, n=10, method="inclusive") for each in rows]
    return Launch(
        low=min(each[0] for each in tenths),
        likely=geometric_mean([median(each) for each in rows]),
        high=max(each[-1] for each in tenths),
        hosts=" to ".join(hosts),
    )
