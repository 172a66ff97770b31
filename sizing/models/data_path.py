"""The data path, S3 -> volume -> loader -> GPU, at *baseline* rates and their burst windows.

A burst spends a bucket of credits that is full at launch; longer transfers run at baseline.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sizing.catalogue import InstanceType
from sizing.figures import Basis
from sizing.models.constants import Constants

MB_PER_MIB = 1.048576
GP3_MB_PER_SECOND = 125 * MB_PER_MIB
# One vCPU belongs to the training process.
_TRAINER_VCPUS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """A workload's reads: a sample's bytes in S3 and per epoch, and CPU seconds to load it."""

    dataset_bytes_per_sample: float
    epoch_bytes_per_sample: float
    loader_cpu_seconds: float
    basis: Basis
    source: str
    # Bytes of one of its files, where a step reads few of them; None: it reads all.
    file_bytes: float | None = None
    # For images: how the loader's time changes with their pixels, around the usual number.
    usual_pixels: float = 0.0
    cpu_seconds_per_megapixel: float = 0.0

    @property
    def loader_range(self) -> tuple[float, float]:
        """Return p10 and p90 of the loader's time relative to it, both from memory.

        A measured time is of one CPU, and others differ; an unmeasured one may be off by half.
        """
        return (0.7, 1.4) if self.basis == "measured" else (0.5, 1.5)


DATA: Mapping[str, DataFacts] = {
    "trajectory": DataFacts(
        dataset_bytes_per_sample=393_216,
        epoch_bytes_per_sample=524_288,
        loader_cpu_seconds=185e-6,
        basis="measured",
        source="a clip is 32x64x64x3 bytes, its features 32x64x128 float16; get and collate of 16 "
        "clips of 16 frames took 92 microseconds a clip on one core (Intel Xeon, 2026-11-26)",
    ),
    # The source's estimate starts from 290 decoded a second, of 0.2 megapixels each.
    "imagenet": DataFacts(
        dataset_bytes_per_sample=110_000,
        epoch_bytes_per_sample=110_000,
        loader_cpu_seconds=1 / 210,
        basis="from memory",
        source="110 KB a JPEG; 280 to 310 decoded a second on a busy vCPU of a g5, of which 72 % "
        "through a uint8 pipeline (estimate; 1,571 a second measured on 2 cores of another CPU)",
        file_bytes=128 * 2**20,  # a shard
        usual_pixels=200_000,
        cpu_seconds_per_megapixel=1 / 290 / 0.2,
    ),
    "growth": DataFacts(
        dataset_bytes_per_sample=512,
        epoch_bytes_per_sample=512,
        loader_cpu_seconds=15e-6,
        basis="measured",
        source="a window is 256 tokens of 2 bytes, memory-mapped; get and collate of 16 windows "
        "took 15 microseconds of CPU time a window (Intel Xeon, 2026-11-22)",
    ),
    "detection": DataFacts(
        dataset_bytes_per_sample=160_000,
        epoch_bytes_per_sample=160_000,
        loader_cpu_seconds=0.03,
        basis="from memory",
        file_bytes=160_000,
        source="COCO 2017: 118,287 images in 18 GB; decode and resize to 800 px about 30 ms",
    ),
}
# Recipes whose samples differ in bytes from their workload's: one cell of 512 features a frame,
# 32 x 1 x 512 float16.
EPOCH_BYTES_PER_SAMPLE: Mapping[tuple[str, str], float] = {("trajectory", "reference"): 32_768}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A rate with a burst, in MB/s, and how long the burst lasts."""

    baseline: float
    burst: float
    burst_seconds: float

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds to move `num_bytes`, starting with full credits."""
        if max(self.burst, self.baseline) <= 0:
            return 0.0  # unknown: the other rates decide, and the plan warns
        megabytes = num_bytes / 1e6
        within = self.burst * self.burst_seconds
        if self.burst <= self.baseline or megabytes <= within:
            return megabytes / max(self.burst, self.baseline)
        return self.burst_seconds + (megabytes - within) / self.baseline

    def bytes_by(self, seconds: float) -> float:
        """Return the bytes moved by then: what takes those `seconds`."""
        if max(self.burst, self.baseline) <= 0:
            return float("inf")
        at_burst = min(seconds, self.burst_seconds) if self.burst > self.baseline else 0.0
        return 1e6 * (self.burst * at_burst + self.baseline * (seconds - at_burst))


def volume_rate(instance: InstanceType, gp3_mb_per_second: float, constants: Constants) -> Rate:
    """Return the data volume's rate on this size: the slower of volume and instance."""
    return Rate(
        baseline=min(gp3_mb_per_second, instance.ebs_baseline_mb_per_second),
        burst=min(gp3_mb_per_second, instance.ebs_max_mb_per_second),
        burst_seconds=constants.ebs_burst_seconds,
    )


# Random 4 KiB reads per second of the size's instance store: AWS's specifications of accelerated
# computing instances, read 2026-11-21. AWS publishes no MB/s.
INSTANCE_STORE_READ_IOPS: Mapping[str, int] = {
    "g5.xlarge": 40_625,
    "g5.2xlarge": 40_625,
    "g5.4xlarge": 125_000,
    "g5.8xlarge": 250_000,
    "g5.12xlarge": 312_500,
    "g5.16xlarge": 250_000,
    "g5.24xlarge": 312_500,
    "g5.48xlarge": 625_000,
}


def instance_store_rate(instance: InstanceType) -> Rate | None:
    """Return the lowest rate of the size's instance store; None if nothing is published.

    It is that of random 4 KiB reads: a dataset's larger ones are no slower. It does not burst.
    """
    reads = INSTANCE_STORE_READ_IOPS.get(instance.size)
    if reads is None:
        return None
    least = reads * 4096 / 1e6
    return Rate(baseline=least, burst=least, burst_seconds=0.0)


def network_rate(instance: InstanceType, constants: Constants) -> Rate:
    """Return the size's network rate; 1 Gb/s is 125 MB/s."""
    baseline = instance.network_baseline_gbps
    return Rate(
        baseline=baseline * 125,
        burst=max(instance.network_peak_gbps, baseline) * 125,
        burst_seconds=constants.network_burst_seconds,
    )


def epoch_data(
    *,
    samples: float,
    facts: DataFacts,
    instance: InstanceType,
    volume: Rate,
    cache_bytes: float,
    epoch_bytes: float,
    runs: int,
) -> dict[str, float]:
    """Return the shortest time that an epoch's data takes, by what it waits for.

    The seconds are for each of `runs` equal runs on one machine.

    Data that fits the page cache is read once and costs later epochs nothing; the runs share it.
    """
    vcpus = max(1.0, instance.vcpus / runs - _TRAINER_VCPUS)
    is_cached = epoch_bytes <= cache_bytes
    return {
        "loader CPU": samples * facts.loader_cpu_seconds / vcpus,
        # An epoch after the burst: only the baseline lasts for the entire run.
        "disk": 0.0 if is_cached else epoch_bytes * runs / 1e6 / volume.baseline,
    }
