"""Where to run by a deadline: the policies that the Guard's decision is compared with.

All have the same safety net, so that all are in time. The paper is "Can't Be Late: Optimizing Spot
Instance Savings under Deadlines" (NSDI'24); its words are used: d changeover delay, cp current and
ep expected progress.
"""

from sizing.fallback.situation import Decision, Market, Situation


class OnDemandOnly:
    """On demand from start to end, for comparison."""

    def choose(self, situation: Situation) -> Decision:
        """Stay on demand."""
        return _plainly("on-demand")


class Greedy:
    """The paper's greedy policy: Spot or wait, until the deadline is in danger."""

    def choose(self, situation: Situation) -> Decision:
        """Wait for Spot as long as the deadline allows."""
        return _plainly("on-demand" if situation.is_in_danger else "spot")


class UniformProgress:
    """The paper's Uniform Progress as its authors' code has it: on demand until Spot returns.

    Their code (rc_cr_threshold_no_condition2) takes Spot back whenever it comes; the paper's rule
    of hysteresis, which waits until cp >= ep(t + 2d), costs a little more here.
    """

    def choose(self, situation: Situation) -> Decision:
        """Keep up with constant progress from the start to the deadline."""
        if situation.is_in_danger:
            return _plainly("on-demand")
        if situation.spot_machine is not None:
            return _plainly("spot")
        expected = situation.now * situation.work / situation.deadline
        is_behind = situation.work - situation.left < expected
        return _plainly("bridge" if situation.place == "on-demand" or is_behind else "spot")


def _plainly(market: Market) -> Decision:
    return Decision(market=market, reason="a rule")
