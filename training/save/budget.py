"""The arithmetic of a save in a notice: what it takes, what time is left, and what to do."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from training.attempt.notice import Notice
from training.save.publish import Cost

# Before anything was measured on this machine: below what gp3 and S3 were observed to reach.
_ASSUMED_SAVE_BYTES_PER_SECOND = 1e9
_ASSUMED_UPLOAD_BYTES_PER_SECOND = 50e6

SavePlan: TypeAlias = Literal["save", "finish, then save", "finish", "give up"]


def estimate(size: int, last: Cost | None) -> Cost:
    """The cost of a save of `size` bytes, from what the last one took."""
    if last is None:
        return Cost(
            bytes=size,
            save_seconds=size / _ASSUMED_SAVE_BYTES_PER_SECOND,
            upload_seconds=size / _ASSUMED_UPLOAD_BYTES_PER_SECOND,
            is_measured=False,
        )
    # Cost is proportional to size; a tiny state is all latency, which is measured as such.
    scale = size / max(last.bytes, 1)
    return Cost(
        bytes=size,
        save_seconds=last.save_seconds * scale,
        upload_seconds=last.upload_seconds * scale,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveBudget:
    """The decision at a notice, with all that it is based on."""

    cost: Cost  # expected of this boundary's save
    step_seconds: float  # from the notice to the boundary
    reserve_seconds: float  # that no save may use
    seconds_left: float
    finish_seconds: float | None  # what a save in progress still needs

    @classmethod
    def of(
        cls, cost: Cost, notice: Notice, boundary: float, finish_seconds: float | None
    ) -> "SaveBudget":
        """Budget a save at `boundary` (monotonic time)."""
        return cls(
            cost=cost,
            step_seconds=max(0.0, boundary - notice.received),
            reserve_seconds=notice.deadline - notice.save_by,
            seconds_left=notice.seconds_left,
            finish_seconds=finish_seconds,
        )

    @property
    def need_seconds(self) -> float:
        """Seconds that a save of this boundary needs."""
        return self.cost.seconds + self.reserve_seconds

    @property
    def plan(self) -> SavePlan:
        """Save this boundary if it fits; otherwise finish the save in progress if that fits.

        If both fit into half the time, the save in progress is finished first, as a free insurance.
        An estimate from assumed rates refuses nothing, because trying is free too.
        """
        left = self.seconds_left
        if left <= 0:
            return "give up"
        finish = self.finish_seconds
        if finish is not None and finish + self.need_seconds <= left / 2:
            return "finish, then save"
        if self.need_seconds <= left or not self.cost.is_measured:
            return "save"
        if finish is not None and finish + self.reserve_seconds <= left:
            return "finish"
        return "give up"

    def __str__(self) -> str:
        in_progress = (
            ""
            if self.finish_seconds is None
            else f"; a save in progress needs {self.finish_seconds:.2f} s more"
        )
        cost = self.cost
        return (
            f"{cost.bytes / 1e6:.1f} MB: {self.step_seconds:.2f} s to the boundary, then "
            f"{cost.save_seconds:.2f} s to save + {cost.upload_seconds:.2f} s to upload "
            f"({'measured' if cost.is_measured else 'assumed'}) + "
            f"{self.reserve_seconds:.1f} s in reserve, {self.seconds_left:.1f} s left{in_progress}"
        )
