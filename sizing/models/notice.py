"""Whether the checkpoint fits the two-minute notice.

save = detection + longest step + copy to the host + hash + upload at *baseline* + commit
Burst credits are not relied on: they may be spent.
"""

from dataclasses import dataclass

from sizing.catalogue import InstanceType
from sizing.catalogue.gpus import Gpu
from sizing.models.constants import Constants
from sizing.models.data_path import network_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeFit:
    """The seconds from a notice to the commit, part by part, and those available."""

    detection: float
    step: float
    copy: float
    hash: float
    upload: float
    commit: float
    budget: float

    @property
    def save(self) -> float:
        """Seconds of the save alone: copy, hash, upload, commit."""
        return self.copy + self.hash + self.upload + self.commit

    @property
    def total(self) -> float:
        """Seconds from the notice to the commit."""
        return self.detection + self.step + self.save

    @property
    def fits(self) -> bool:
        """Whether the commit comes before the margin starts."""
        return self.total <= self.budget

    def sentence(self) -> str:
        """Return the arithmetic in one sentence."""
        return (
            f"{self.detection:.0f} s to detect the notice + {self.step:.1f} s to finish the step"
            f" + {self.copy:.1f} s copy + {self.hash:.1f} s hash + {self.upload:.1f} s upload at"
            f" baseline + {self.commit:.0f} s commit = {self.total:.1f} s of"
            f" {self.budget:.0f} s"
        )


def notice_fit(
    *,
    checkpoint_bytes: float,
    longest_step_seconds: float,
    gpu: Gpu,
    instance: InstanceType,
    constants: Constants,
    notice_seconds: float | None = None,
) -> NoticeFit:
    """Return how a checkpoint of this many bytes fits the notice on this instance type."""
    notice = constants.notice_seconds if notice_seconds is None else notice_seconds
    network = network_rate(instance, constants).baseline * constants.upload_share
    gigabytes = checkpoint_bytes / 1e9
    return NoticeFit(
        detection=constants.detection_seconds,
        step=longest_step_seconds,
        copy=gigabytes / gpu.host_copy_gb_per_second,
        hash=gigabytes / constants.hash_gb_per_second,
        upload=1e3 * gigabytes / network if network else float("inf"),
        commit=constants.commit_seconds,
        budget=max(0.0, notice - constants.notice_margin_seconds),
    )
