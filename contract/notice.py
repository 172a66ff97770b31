"""The arithmetic of a Spot notice: which seconds of it no save may use, and what is safe to start.

Three margins, each a number of seconds and, of a short notice, a share. From the end backwards: the
process needs `exit_reserve` to stop, a save leaves `save_reserve` before it, and the last planned
save leaves `last_save_margin` in all: more than the other two together, so a last save in time is
over before the forced exit (training/attempt/supervisor.py) would start.
"""

from typing import Literal, TypeAlias, get_args

# EC2 announces an interruption two minutes before it, and often less.
MAX_SECONDS = 120

# After the commit at a notice: train on and commit again as late as is safe, or stop.
Policy: TypeAlias = Literal["train-on", "stop"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

# A save or a step may take this many times what the last or the longest one was measured to take.
_SAFETY = 1.5
# Kept for the release, and for a machine that is taken early.
_MARGIN_SECONDS, _MARGIN_SHARE = 10.0, 0.2
# Kept for the head's write, the events and the end of the process.
_SAVE_RESERVE_SECONDS, _SAVE_RESERVE_SHARE = 2.0, 0.1
# Kept for the release and the end of the process, in addition to what a save reserves.
_EXIT_RESERVE_SECONDS, _EXIT_RESERVE_SHARE = 1.0, 0.05


def last_save_margin(notice_seconds: float) -> float:
    """Seconds that must be left when the last save ends."""
    return min(_MARGIN_SECONDS, _MARGIN_SHARE * notice_seconds)


def save_reserve(notice_seconds: float) -> float:
    """Seconds that no save may use."""
    return min(_SAVE_RESERVE_SECONDS, _SAVE_RESERVE_SHARE * notice_seconds)


def exit_reserve(notice_seconds: float) -> float:
    """Seconds that the end of the process needs."""
    return min(_EXIT_RESERVE_SECONDS, _EXIT_RESERVE_SHARE * notice_seconds)


def last_save_needs(*, work_seconds: float, save_seconds: float, notice_seconds: float) -> float:
    """Seconds that must be left for work and the last save after it to be safe to start."""
    return _SAFETY * (work_seconds + save_seconds) + last_save_margin(notice_seconds)


def idle_seconds(*, save_seconds: float, step_seconds: float, notice_seconds: float) -> float:
    """How much of a notice the trainer does not train in.

    It saves at once, trains on, and starts a last save while that is still safe. Where both do not
    fit it stops at the notice: all of it is idle.
    """
    last = last_save_needs(
        work_seconds=step_seconds, save_seconds=save_seconds, notice_seconds=notice_seconds
    )
    return min(save_seconds + last, notice_seconds)
