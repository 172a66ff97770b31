"""Where to run: on Spot, on demand, or nowhere for now. No policy here knows the future.

The paper is "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI'24); its words
are used: C work left, R time left, d changeover delay, cp current and ep expected progress.
"""

import math
from dataclasses import dataclass

from sizing.spot.replay import Place, View


class OnDemandOnly:
    """On demand from start to end, for comparison."""

    def choose(self, view: View) -> tuple[Place, float]:
        """Stay on demand."""
        return "on-demand", math.inf


def must_stay_on_demand(view: View, *, reserve: float = 0.0) -> bool:
    """Return whether the paper's Safety Net Rule holds: R < C + 2d, too late to try Spot again."""
    return safety_time(view) - reserve < view.now


def changeover(view: View) -> float:
    """Return the paper's d: seconds that moving to another machine costs, save included."""
    return view.job.restart + view.job.checkpoint


def safety_time(view: View) -> float:
    """Return when the Safety Net Rule will hold if nothing is done until then."""
    return view.job.deadline - view.needed - 2 * changeover(view)


class Greedy:
    """The paper's greedy policy: Spot or wait, until the Safety Net Rule sends it on demand."""

    def choose(self, view: View) -> tuple[Place, float]:
        """Wait for Spot as long as the deadline allows."""
        if must_stay_on_demand(view):
            return "on-demand", math.inf
        if view.has_spot:
            return "spot", math.inf
        return "none", _after(view, safety_time(view))


@dataclass(frozen=True, slots=True)
class UniformProgress:
    """The paper's Uniform Progress, with hysteresis and the Safety Net Rule.

    The rules do not say what a job on demand does that has caught up while there is no Spot: taken
    literally it goes idle; `stays` keeps it on demand until Spot comes, which saves restarts.
    """

    stays: bool = False

    def choose(self, view: View) -> tuple[Place, float]:
        """Keep up with constant progress from the start to the deadline."""
        job = view.job
        pace = job.work / job.deadline
        if must_stay_on_demand(view):
            return "on-demand", math.inf
        if view.place == "on-demand":
            ahead = view.progress - (view.now + 2 * changeover(view)) * pace
            if ahead < 0:
                # By then the restart is over, or the policy is asked again.
                return "on-demand", _after(view, view.now - ahead / (1 - pace))
        if view.has_spot:
            return "spot", math.inf
        if view.progress < view.now * pace:
            return "on-demand", _after(view, view.now + changeover(view))
        if self.stays and view.place == "on-demand":
            return "on-demand", math.inf
        return "none", _after(view, min(view.progress / pace, safety_time(view)))


def _after(view: View, time: float) -> float:
    """Return a time to be asked again that is later than now."""
    return max(time, view.now) + 1.0
