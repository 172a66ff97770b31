"""Host memory of one or several runs on a machine: why four workers with a copy each ran out.

need = runs * (process + unshared data) + shared data + the largest transient
"""

from dataclasses import dataclass

from sizing.catalogue import Instance
from sizing.models.constants import GIB, Constants


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """GiB on the host; `transient` is the extra memory that loading the data takes meanwhile."""

    runs: int
    processes: float
    unshared: float
    shared: float
    transient: float
    usable: float
    total: float

    @property
    def need(self) -> float:
        """GiB that all runs hold at their peak."""
        return self.processes + self.unshared + self.transient

    @property
    def fits(self) -> bool:
        """Whether it fits the usable memory; shared mapped files may be dropped and read again."""
        return self.need <= self.usable

    @property
    def cache_bytes(self) -> float:
        """Bytes left for the page cache."""
        return max(0.0, (self.usable - self.need) * GIB)

    def can_hold(self, num_bytes: float) -> bool:
        """Whether a copy of `num_bytes`, such as a checkpoint, fits beside the runs."""
        return num_bytes <= self.cache_bytes

    def sentence(self) -> str:
        """Return the arithmetic in one sentence."""
        return (
            f"{self.runs} run{'s need' if self.runs > 1 else ' needs'} {self.need:.1f} GiB of host"
            " memory"
            f" ({self.processes:.1f} processes + {self.unshared:.1f} unshared data"
            f" + {self.transient:.1f} while loading), {self.usable:.1f} of {self.total:.0f} GiB are"
            " usable"
        )


def host_memory(
    instance: Instance,
    constants: Constants,
    *,
    runs: int = 1,
    data_bytes_each: float = 0.0,
    shared_bytes: float = 0.0,
    load_copies: float = 1.0,
) -> HostMemory:
    """Return the host memory of `runs` equal runs.

    data_bytes_each: what each process holds itself (0 where the data is memory-mapped);
    load_copies: copies in memory while loading (2: a list of samples and their stack). At best the
    runs load at different moments, so one transient is counted: a lower bound.
    """
    if runs < 1:
        raise ValueError(f"runs is {runs}; give at least 1")
    if min(data_bytes_each, shared_bytes) < 0 or load_copies < 1:
        raise ValueError(
            f"data_bytes_each is {data_bytes_each:g}, shared_bytes {shared_bytes:g}, load_copies "
            f"{load_copies:g}; give bytes from 0 and at least 1 copy"
        )
    return HostMemory(
        runs=runs,
        processes=runs * constants.process_gib,
        unshared=runs * data_bytes_each / GIB,
        shared=shared_bytes / GIB,
        transient=(load_copies - 1) * data_bytes_each / GIB,
        usable=instance.memory_gib * constants.usable_memory_share,
        total=instance.memory_gib,
    )
