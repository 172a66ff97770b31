"""The arithmetic of a Spot notice: which of its seconds no save may use, and what is safe to start.

Three margins, each a number of seconds or, for a short notice, a share of it. Backwards from the
end: the process needs `exit_reserve` to stop, a save leaves `save_reserve` before that, and the
last planned save leaves `last_save_margin` in all. That is more than the other two together, so a
timely last save ends before the forced exit (training/durable/attempt/supervisor.py) would start.
"""

from typing import Literal, TypeAlias, get_args

# EC2 announces an interruption two minutes ahead, and often less.
MAX_SECONDS = 120

# After the commit at a notice: train on and commit again as late as is safe, or stop.
Policy: TypeAlias = Literal["train-on", "stop"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

# A save may take this many times the last one's measured time, a step this many times the longest.
_SAFETY = 1.5
# Reserved for the release, and in case the machine is taken early.
_MARGIN_SECONDS, _MARGIN_SHARE = 10.0, 0.2
# Reserved for the head's write, the events and the end of the process.
_SAVE_RESERVE_SECONDS, _SAVE_RESERVE_SHARE = 2.0, 0.1
# Reserved for the release and the end of the process, in addition to a save's reserve.
_EXIT_RESERVE_SECONDS, _EXIT_RESERVE_SHARE = 1.0, 0.05


def last_save_margin(notice_seconds: float) -> float:
    """Return the seconds that must be left when the last save ends."""
    return min(_MARGIN_SECONDS, _MARGIN_SHARE * notice_seconds)


def save_reserve(notice_seconds: float) -> float:
    """Return the seconds that no save may use."""
    return min(_SAVE_RESERVE_SECONDS, _SAVE_RESERVE_SHARE * notice_seconds)


def exit_reserve(notice_seconds: float) -> float:
    """Return the seconds that the process needs to end."""
    return min(_EXIT_RESERVE_SECONDS, _EXIT_RESERVE_SHARE * notice_seconds)


def last_save_needs(*, work_seconds: float, save_seconds: float, notice_seconds: float) -> float:
    """Return the seconds that must be left to start work and the last save after it safely."""
    return _SAFETY * (work_seconds + save_seconds) + last_save_margin(notice_seconds)


def idle_seconds(*, save_seconds: float, step_seconds: float, notice_seconds: float) -> float:
    """Return the seconds of a notice in which the trainer does not train.

    It saves at once, trains on, and starts a last save while that is still safe. Where the two do
    not fit, it stops at the notice and all of it is idle.
    """
    last = last_save_needs(
        work_seconds=step_seconds, save_seconds=save_seconds, notice_seconds=notice_seconds
    )
    return min(save_seconds + last, notice_seconds)
