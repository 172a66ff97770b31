"""The constants that are not fitted, with their sources; calibration may replace any of them.

Those fitted to published runs are in fitted.json.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from contract.suggestion import suggest

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """The constants in the units of their names, each with its basis and source above it."""

    # From memory: the CUDA context and the libraries' code, outside PyTorch's allocations: 0.5
    # to 1 GiB.
    context_mib: float = 700.0
    # From memory: the caching allocator's fragmentation, a share of live memory.
    fragmentation_share: float = 0.10
    # Modelled: 1 until `python -m sizing plan --run RUN --calibrate` measures it.
    time_factor: float = 1.0
    launch_factor: float = 1.0
    memory_factor: float = 1.0
    # From memory: resident memory of a Python process with torch and CUDA.
    process_gib: float = 3.0
    # Modelled: a host above 80 % of its memory cannot recover.
    usable_memory_share: float = 0.80
    # Published: EC2 user guide: two minutes, best effort.
    notice_seconds: float = 120.0
    # Published: userdata/interruption_handler.py polls every 2 s.
    detection_seconds: float = 2.0
    # Measured: sha256 on one core, facts of the engine, 2026-11.
    hash_gb_per_second: float = 2.0
    # Modelled: the trainer's reserve for writing the head.
    commit_seconds: float = 2.0
    # Modelled: kept free, because a notice may come late.
    notice_margin_seconds: float = 10.0
    # From memory: share of the baseline network rate that multipart uploads reach.
    upload_share: float = 0.8
    # From memory: share of the baseline network rate that NCCL reaches over sockets; EFA is better.
    exchange_share: float = 0.8
    # From memory: EC2 launch to user data on a Deep Learning AMI; depot.dev boots its own AMI in 5
    # to 40 s.
    launch_seconds: float = 90.0
    # Measured: benchmarks/LOG.md: user data 3.0 to 4.2 s, without the dataset.
    user_data_seconds: float = 4.0
    # Modelled: 8 s on a laptop (benchmarks/LOG.md) + 30 s lease TTL + a few seconds of CUDA start.
    first_step_seconds: float = 45.0
    # Published: EC2 user guide: at least 30 minutes once every 24 hours.
    ebs_burst_seconds: float = 1800.0
    # Published: EC2 user guide: best effort, 5 minutes or more.
    network_burst_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < 1e9:
                raise ValueError(f"constant {name} is {value}; use a number from 0")

    def replaced(self, values: Mapping[str, float]) -> "Constants":
        """Return these constants with some replaced by name; an unknown name is a ValueError."""
        known = list(dataclasses.asdict(self))
        for name in values:
            if name not in known:
                raise ValueError(f"constant {name!r} is unknown; {suggest(name, known)}")
        return dataclasses.replace(self, **{name: float(v) for name, v in values.items()})
