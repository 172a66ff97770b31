"""The constants that are not fitted, with their sources; a calibration may replace any of them.

Those that are fitted to published runs are in fitted.json (`python -m benchmarks evidence --fit`).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from sizing.figures import Basis
from sizing.suggestion import suggest

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """The constants, in the units of their names. `ABOUT` has each one's basis and source."""

    # GPU memory
    context_mib: float = 700.0
    fragmentation_share: float = 0.10
    # Step time
    least_step_seconds: float = 0.010
    time_factor: float = 1.0
    launch_factor: float = 1.0
    memory_factor: float = 1.0
    # Host
    process_gib: float = 3.0
    usable_memory_share: float = 0.80
    # Notice
    notice_seconds: float = 120.0
    detection_seconds: float = 2.0
    hash_gb_per_second: float = 2.0
    commit_seconds: float = 2.0
    notice_margin_seconds: float = 10.0
    upload_share: float = 0.8
    # Restart
    launch_seconds: float = 90.0
    user_data_seconds: float = 4.0
    first_step_seconds: float = 45.0
    ebs_burst_seconds: float = 1800.0
    network_burst_seconds: float = 300.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < 1e9:
                raise ValueError(f"constant {field.name} is {value}; give a number from 0")

    def replaced(self, values: Mapping[str, float]) -> "Constants":
        """Return these constants with some replaced by name; an unknown name is a ValueError."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in values:
            if name not in known:
                raise ValueError(f"constant {name!r} is unknown; {suggest(name, known)}")
        return dataclasses.replace(self, **{name: float(v) for name, v in values.items()})


ABOUT: Mapping[str, tuple[Basis, str]] = {
    "context_mib": (
        "from memory",
        "the CUDA context and the libraries' code, outside of what PyTorch allocates: 0.5 to 1 GiB",
    ),
    "fragmentation_share": (
        "from memory",
        "the caching allocator's fragmentation, a share of live memory",
    ),
    "least_step_seconds": (
        "published",
        "liquid_mono_to_3d on an A10G: 13.3 s an epoch of 1,000 small steps, loading included; "
        "used where kernels were not counted",
    ),
    "time_factor": ("modelled", "1 until `python -m sizing plan --run` calibrates it"),
    "launch_factor": ("modelled", "1 until `python -m sizing plan --run` calibrates it"),
    "memory_factor": ("modelled", "1 until `python -m sizing plan --run` calibrates it"),
    "process_gib": ("from memory", "resident memory of a Python process with torch and CUDA"),
    "usable_memory_share": ("modelled", "a host above 80 % of its memory cannot recover"),
    "notice_seconds": ("published", "EC2 user guide: two minutes, best effort"),
    "detection_seconds": ("published", "userdata/interruption_handler.py polls every 2 s"),
    "hash_gb_per_second": ("measured", "sha256 on one core, facts of the engine, 2026-11"),
    "commit_seconds": (
        "modelled",
        "the trainer's reserve for writing the head",
    ),
    "notice_margin_seconds": ("modelled", "kept free, because a notice may come late"),
    "upload_share": (
        "from memory",
        "share of the baseline network rate that multipart uploads reach",
    ),
    "launch_seconds": (
        "from memory",
        "EC2 launch to user data on a Deep Learning AMI; depot.dev boots its own AMI in 5 to 40 s",
    ),
    "user_data_seconds": (
        "measured",
        "benchmarks/LOG.md: user data 3.0 to 4.2 s, without the dataset",
    ),
    "first_step_seconds": (
        "modelled",
        "8 s on a laptop (benchmarks/LOG.md) + 30 s lease TTL + a few seconds of CUDA start",
    ),
    "ebs_burst_seconds": ("published", "EC2 user guide: at least 30 minutes once every 24 hours"),
    "network_burst_seconds": ("published", "EC2 user guide: best effort, 5 minutes or more"),
}
