"""The decision: on demand if the deadline is in danger, else the market expected to be cheapest."""

from collections.abc import Mapping

from sizing.fallback.lookahead import expected_hours
from sizing.fallback.situation import Decision, Market, Situation, SpotHistory

# What a market must save to be preferred to staying on demand: less is a rounding error.
LEAST_GAIN_HOURS = 1e-6


def decide_market(situation: Situation, history: SpotHistory) -> Decision:
    """Choose a market until the next decision, with the figures that led to it."""
    figures = {
        "hours_to_deadline": (situation.deadline - situation.now) / 3600,
        "hours_left": situation.left / 3600,
        "slack_hours": situation.slack / 3600,
        "least_slack_hours": situation.least_slack / 3600,
        "spot_losses_per_hour": history.losses_per_hour,
        "spot_arrivals_per_hour": history.arrivals_per_hour,
    }
    if situation.is_in_danger:
        reason = (
            f"the deadline is in danger: {situation.slack / 60:.1f} min may pass without progress, "
            f"and {situation.least_slack / 60:.1f} must remain"
        )
        return Decision(market="on-demand", reason=reason, figures=figures)
    if situation.place == "spot":
        # Leaving a machine that is training never pays.
        return Decision(market="spot", reason="it trains, and no deadline is near", figures=figures)
    hours = expected_hours(situation, history)
    usd = {market: each * situation.on_demand_per_hour for market, each in hours.items()}
    figures |= {f"usd_{market.replace('-', '_')}": each for market, each in usd.items()}
    expected = ", ".join(f"{name} ${each:.2f}" for name, each in usd.items())
    return Decision(
        market=_cheapest(hours),
        reason=f"expected until the end: {expected}",
        figures=figures,
    )


def _cheapest(hours: Mapping[Market, float]) -> Market:
    """Return the cheapest market; on demand if no other gains anything.

    A bridge requests Spot. If returning no longer paid, each Spot machine that came would be sent
    away and requested again.
    """
    best = min(hours, key=lambda market: hours[market])
    return best if hours[best] < hours["on-demand"] - LEAST_GAIN_HOURS else "on-demand"
