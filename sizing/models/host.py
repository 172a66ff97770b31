"""Host memory of one or several runs on a machine: why four workers with a copy each ran out.

need = runs * (process + unshared data) + shared data + the largest transient
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sizing.catalogue import InstanceType
from sizing.models.constants import GIB, Constants
from sizing.models.footprints import Footprint


@dataclass(frozen=True, kw_only=True, slots=True)
class StartMemory:
    """GiB held on the host by the largest stage until its model is on the GPU.

    resume: the model under construction, and the checkpoint read for it;
    grow: that model, and the previous stage's model and optimizer, which it may start from.
    """

    resume: float = 0.0
    grow: float = 0.0

    @property
    def most(self) -> float:
        """The larger one: a run does both, but never at once."""
        return max(self.resume, self.grow)

    def sentence(self) -> str:
        """Return what takes the memory, as text."""
        return f"{self.resume:.1f} to resume, {self.grow:.1f} to start from the stage before"


def start_memory(footprints: Sequence[Footprint]) -> StartMemory:
    """Return the memory that a run's Train stages hold while they start, the largest of each."""
    trained = [each for each in footprints if each.kind == "train"]
    resume = [each.parameter_bytes + each.checkpoint_bytes for each in trained]
    grow = [
        each.parameter_bytes + before.parameter_bytes + before.optimizer_bytes
        for before, each in pairwise(trained)
    ]
    return StartMemory(resume=max(resume, default=0) / GIB, grow=max(grow, default=0) / GIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """GiB on the host; `transient` is the extra memory that is taken while the data is loading.

    `starting` is the memory of a stage's start, when no data is being loaded.
    """

    runs: int
    processes: float
    unshared: float
    transient: float
    starting: StartMemory
    usable: float
    total: float

    @property
    def need(self) -> float:
        """GiB that all runs hold at their peak."""
        return self.processes + self.unshared + self.peak

    @property
    def peak(self) -> float:
        """GiB that one of the runs holds for a moment."""
        return max(self.transient, self.starting.most)

    @property
    def fits(self) -> bool:
        """Whether it fits the usable memory; shared mapped files may be dropped and read again."""
        return self.need <= self.usable

    @property
    def cache_bytes(self) -> float:
        """Bytes left for the page cache."""
        held = self.processes + self.unshared + self.transient
        return max(0.0, (self.usable - held) * GIB)

    def can_hold(self, num_bytes: float) -> bool:
        """Whether a copy of `num_bytes`, such as a checkpoint, fits in memory next to the runs."""
        return num_bytes <= self.cache_bytes

    def sentence(self) -> str:
        """Return the arithmetic in one sentence."""
        return (
            f"{self.runs} run{'s need' if self.runs > 1 else ' needs'} {self.need:.1f} GiB of host"
            " memory"
            f" ({self.processes:.1f} processes + {self.unshared:.1f} unshared data"
            f" + {self._moment()}), {self.usable:.1f} of {self.total:.0f} GiB are usable"
        )

    def _moment(self) -> str:
        if self.starting.most > max(self.transient, 0.05):
            return f"{self.starting.most:.1f} while a stage starts: {self.starting.sentence()}"
        return f"{self.transient:.1f} while loading"


def host_memory(
    instance: InstanceType,
    constants: Constants,
    *,
    runs: int = 1,
    data_bytes_each: float = 0.0,
    starting: StartMemory | None = None,
) -> HostMemory:
    """Return the host memory of `runs` equal runs.

    data_bytes_each: the bytes that each process holds itself (0 if the data is memory-mapped), and
    again while loading (a list of samples and their stack). At best the runs load at different
    moments, so one transient is counted: a lower bound;
    starting: the memory of a stage's start, likewise counted once.
    """
    return HostMemory(
        runs=runs,
        processes=runs * constants.process_gib,
        unshared=runs * data_bytes_each / GIB,
        transient=data_bytes_each / GIB,
        starting=starting or StartMemory(),
        usable=instance.memory_gib * constants.usable_memory_share,
        total=instance.memory_gib,
    )
