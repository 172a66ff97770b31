"""The arithmetic of a notice: what a save will take, what is left, and what to do about it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from contract.notice import save_reserve
from training.interruption.notice import Notice

# Before anything was measured on this machine: below what gp3 and S3 were seen to give.
_ASSUMED_SAVE_BYTES_PER_SECOND = 1e9
_ASSUMED_UPLOAD_BYTES_PER_SECOND = 50e6

Plan: TypeAlias = Literal["save", "finish, then save", "finish", "give up"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one commit on this machine."""

    bytes: int
    save_seconds: float  # before the first byte was sent
    upload_seconds: float

    @property
    def durable_seconds(self) -> float:
        """From the boundary to the commit."""
        return self.save_seconds + self.upload_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """One decision at a notice, with everything that it rests on."""

    bytes: int
    step_seconds: float  # from the notice to the boundary
    save_seconds: float
    upload_seconds: float
    reserve_seconds: float
    seconds_left: float
    finish_seconds: float | None  # what a save under way still needs
    is_measured: bool

    @property
    def need_seconds(self) -> float:
        """For a save of this boundary."""
        return self.save_seconds + self.upload_seconds + self.reserve_seconds

    @property
    def plan(self) -> Plan:
        """Save this boundary if it fits; else finish the save under way if that fits.

        When both fit into half of the time, the one under way is finished first: it is an insurance
        that costs nothing. An assumed rate refuses nothing: trying costs nothing either.
        """
        left = self.seconds_left
        if left <= 0:
            return "give up"
        finish = self.finish_seconds
        if finish is not None and finish + self.need_seconds <= left / 2:
            return "finish, then save"
        if self.need_seconds <= left or not self.is_measured:
            return "save"
        if finish is not None and finish + self.reserve_seconds <= left:
            return "finish"
        return "give up"

    def __str__(self) -> str:
        under_way = (
            ""
            if self.finish_seconds is None
            else f"; a save under way needs {self.finish_seconds:.2f} s more"
        )
        return (
            f"{self.bytes / 1e6:.1f} MB: {self.step_seconds:.2f} s to the boundary, then "
            f"{self.save_seconds:.2f} s to save + {self.upload_seconds:.2f} s to upload "
            f"({'measured' if self.is_measured else 'assumed'}) + "
            f"{self.reserve_seconds:.1f} s in reserve, {self.seconds_left:.1f} s left{under_way}"
        )


def reserve_of(notice: Notice) -> float:
    """Seconds of the notice that no save may use."""
    return save_reserve(notice.deadline - notice.received)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds that a save will take."""

    save_seconds: float
    upload_seconds: float
    is_measured: bool

    @property
    def seconds(self) -> float:
        """From the boundary to the commit."""
        return self.save_seconds + self.upload_seconds


def estimate(size: int, last: Cost | None) -> Estimate:
    """What a save of `size` bytes will take, by what the last one did."""
    if last is None:
        return Estimate(
            save_seconds=size / _ASSUMED_SAVE_BYTES_PER_SECOND,
            upload_seconds=size / _ASSUMED_UPLOAD_BYTES_PER_SECOND,
            is_measured=False,
        )
    # A state of other size costs in proportion; a tiny one is all latency and is measured as such.
    scale = size / max(last.bytes, 1)
    return Estimate(
        save_seconds=last.save_seconds * scale,
        upload_seconds=last.upload_seconds * scale,
        is_measured=True,
    )


def draw_up(
    size: int, expected: Estimate, notice: Notice, boundary: float, finish_seconds: float | None
) -> Budget:
    """The budget of a save of `size` bytes at `boundary` (monotonic)."""
    return Budget(
        bytes=size,
        step_seconds=max(0.0, boundary - notice.received),
        save_seconds=expected.save_seconds,
        upload_seconds=expected.upload_seconds,
        reserve_seconds=reserve_of(notice),
        seconds_left=notice.seconds_left,
        finish_seconds=finish_seconds,
        is_measured=expected.is_measured,
    )
