"""Does the checkpoint fit the two-minute notice, and how long is a machine away after it?

save = detection + longest step + copy to the host + hash + upload at *baseline* + commit
Boot, sync and resume add up to the restart. No credit of a burst is counted on: it may be spent.
"""

from __future__ import annotations

from dataclasses import dataclass

from sizing.catalogue import Instance
from sizing.constants import Constants
from sizing.data_path import Rate, network_rate, sync_seconds
from sizing.gpus import Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeFit:
    """Seconds from a notice to the commit, part by part, and what there is."""

    detection: float
    step: float
    copy: float
    hash: float
    upload: float
    commit: float
    budget: float

    @property
    def save(self) -> float:
        """The save alone: copy, hash, upload, commit."""
        return self.copy + self.hash + self.upload + self.commit

    @property
    def total(self) -> float:
        """From the notice to the commit."""
        return self.detection + self.step + self.save

    @property
    def fits(self) -> bool:
        """Whether the commit comes before the margin does."""
        return self.total <= self.budget

    def sentence(self) -> str:
        """The arithmetic in one sentence."""
        return (
            f"{self.detection:.0f} s to see the notice + {self.step:.1f} s to end the step"
            f" + {self.copy:.1f} s copy + {self.hash:.1f} s hash + {self.upload:.1f} s upload at"
            f" baseline + {self.commit:.0f} s commit = {self.total:.1f} s, there are"
            f" {self.budget:.0f} s"
        )


def notice_fit(
    *,
    checkpoint_bytes: float,
    longest_step_seconds: float,
    gpu: Gpu,
    instance: Instance,
    constants: Constants,
    notice_seconds: float | None = None,
) -> NoticeFit:
    """Return whether a checkpoint of this size reaches S3 within the notice on this size."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Seconds of a replacement until it trains: the wait for capacity is not a part of it."""

    launch: float
    user_data: float
    sync: float
    resume: float
    first_step: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.launch + self.user_data + self.sync + self.resume + self.first_step


def restart(
    *,
    dataset_bytes: float,
    checkpoint_bytes: float,
    artifact_bytes: float,
    network: Rate,
    volume: Rate,
    constants: Constants,
) -> Restart:
    """Return what a replacement does before its first step."""
    return Restart(
        launch=constants.launch_seconds,
        user_data=constants.user_data_seconds,
        sync=sync_seconds(dataset_bytes, network, volume),
        resume=sync_seconds(checkpoint_bytes + artifact_bytes, network, volume),
        first_step=constants.first_step_seconds,
    )
