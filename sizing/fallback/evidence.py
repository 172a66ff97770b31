"""What Spot did so far: hours with and without a machine, and how often each state ended."""

from dataclasses import dataclass, replace

# The prior, in hours (sizing/spot/interruptions.py, one zone), and its weight in ends.
PRIOR_LIFE_HOURS = 2.6
PRIOR_WAIT_HOURS = 1.66
PRIOR_WEIGHT = 2.0
# Evidence this old counts half.
HALF_LIFE_HOURS = 24.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Discounted hours of Spot's two states and their ends, as of `seconds` in the job."""

    up_hours: float = 0.0
    losses: float = 0.0
    down_hours: float = 0.0
    arrivals: float = 0.0
    seconds: float = 0.0
    # The Spot machine seen then; None: there was none, although it was asked for.
    machine: str | None = None
    # Nothing is learned from a time in which Spot was not asked for.
    was_asked: bool = False

    @property
    def losses_per_hour(self) -> float:
        """Losses per hour with a machine, prior included."""
        return (self.losses + PRIOR_WEIGHT) / (self.up_hours + PRIOR_WEIGHT * PRIOR_LIFE_HOURS)

    @property
    def arrivals_per_hour(self) -> float:
        """Machines that come per hour without one, prior included."""
        return (self.arrivals + PRIOR_WEIGHT) / (self.down_hours + PRIOR_WEIGHT * PRIOR_WAIT_HOURS)


def observe(evidence: Evidence, *, seconds: float, machine: str | None, asks: bool) -> Evidence:
    """Count the time since the last look, and what changed in it."""
    hours = max(0.0, seconds - evidence.seconds) / 3600
    keep = 0.5 ** (hours / HALF_LIFE_HOURS)
    had, was_asked = evidence.machine is not None, evidence.was_asked
    is_lost = was_asked and had and machine != evidence.machine
    has_come = was_asked and machine is not None and machine != evidence.machine
    return replace(
        evidence,
        up_hours=evidence.up_hours * keep + (hours if was_asked and had else 0.0),
        losses=evidence.losses * keep + is_lost,
        down_hours=evidence.down_hours * keep + (hours if was_asked and not had else 0.0),
        arrivals=evidence.arrivals * keep + has_come,
        seconds=max(seconds, evidence.seconds),
        machine=machine,
        was_asked=asks,
    )
